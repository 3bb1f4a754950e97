"""The order of samples, leases of positions, sample readers, resident tensors, and random state.

Decides which sample belongs to a position, and how a batch reaches its device. Called by `rank`, the lab and `api`.
"""
