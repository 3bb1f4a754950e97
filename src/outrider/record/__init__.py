"""The files of a run: run folder, record, checkpoints, metrics, events.

Decides formats and the order of writes, so that a crash never leaves half a file. Called by `rank`, `launch` and `api`.
"""
