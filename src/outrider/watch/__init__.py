"""The live page of runs: reads the files that ranks append to, and serves a page on loopback.

`watch_server` serves, `run_view` decides what is shown, `run_reader` follows the files. Nothing here writes to a run.
"""
