"""Sums tensors over ranks: shared memory within a host, Gloo between hosts, NCCL between CUDA devices.

Decides how the bytes move. Called by the averagers, which decide what is sent and what the sum means.
The names below are for users who write their own backend: see docs/policies.md.
"""

from outrider.average.transport.backend_table import BACKEND_TABLE, BackendSpec, CollectiveContext
from outrider.average.transport.collective import BlockingCollective, RankCollective

__all__ = ["BACKEND_TABLE", "BackendSpec", "BlockingCollective", "CollectiveContext", "RankCollective"]
