"""What the suite's records say: in markdown, as a page, and against a baseline. Knows no torch."""
