"""Averages of parameters, buffers and gradients: flat arenas, host and device backends, outer step, checks.

Decides what each rank sends and what the sum means; `transport` moves the bytes. Called by `rank`, lab and `wrap()`.
"""
