"""The benchmark suite: cases, sweeps that resume, and what their runs left behind."""
