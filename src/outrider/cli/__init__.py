"""The command line: each command parses its arguments, calls another package and prints the result."""
