"""Runs policies under a virtual clock: the simulator without torch, and the lab with real replicas in one process.

Decides what happens at which virtual time. Called by users with what-if questions, by `diagnose` and by tests.
"""
