"""The benchmark suite's models, as functions that return a new one, and what to train and measure them with."""
