"""Two iteration benchmarks compared, with a test on their raw samples. Knows no torch."""
