"""One copy of model, optimizer and schedule on one device, and how it steps; the recipe of a run.

Decides how a step runs: eager, compiled, captured as a CUDA graph, or in the user's loop. Called by `rank` and the lab.
"""
