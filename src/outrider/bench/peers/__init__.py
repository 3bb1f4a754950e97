"""Other ways to train on several devices, run under the same conditions to compare with."""
