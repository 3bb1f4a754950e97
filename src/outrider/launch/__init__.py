"""Starts ranks on this host and watches them: forkserver, payload, processes, signals, and the cause of a failure.

Decides how a process becomes a rank, and what the end of that process means for the run. Called by `api`.
"""
