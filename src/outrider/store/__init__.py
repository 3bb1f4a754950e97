"""The key-value store of a run on one host: server process, client and protocol, private to the user.

Decides how keys are stored and protected, and how clients wait for them. Called by `world`.
"""
