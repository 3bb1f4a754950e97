"""The public API: train(), the builder, Session, setup(), wrap() and the handle of a run.

Decides whether this process starts ranks or is one. Called by users, the command line and the benchmarks.
"""
