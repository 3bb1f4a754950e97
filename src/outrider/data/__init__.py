"""The order of samples, leases of positions, sample readers, resident tensors, and random state.

Decides which sample a position is, and how a batch reaches its device. Called by `rank`, the lab and `api`.
"""
