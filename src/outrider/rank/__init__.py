"""The life of one rank: set up, train, evaluate, account for the epoch, save, end.

Decides in which order a rank does these things. Its driver interprets the effects of a policy, its meter measures them.
Called by `train()` and `Session` in the process of the rank.
"""
