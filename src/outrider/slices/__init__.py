"""Slices of a GPU by NVIDIA MPS: the daemon, the variables of each rank, and checks that a slice really works.

Called by `launch` before ranks start, and by `world` in a rank.
"""
