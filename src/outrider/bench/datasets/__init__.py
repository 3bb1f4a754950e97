"""The benchmark suite's data sets: made by the program, or read from files that are already there."""
