"""The benchmark suite's data sets: read from their official files, downloaded, or made by the program."""
