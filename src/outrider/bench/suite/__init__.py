"""The benchmark suite: cases, resumable sweeps, and the records of their runs."""
