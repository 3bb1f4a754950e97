"""All peers by name, each at its defaults and at one tuned setting.

Decides nothing; the modes of the benchmarks look peers up here.
"""

from __future__ import annotations

from outrider.bench.peers.accelerate_local_sgd import ACCELERATE_LOCAL_SGD, ACCELERATE_LOCAL_SGD_TUNED
from outrider.bench.peers.peer import PeerFramework, obstacle
from outrider.bench.peers.torch_peers import DDP, DP, POST_LOCAL_SGD, POST_LOCAL_SGD_TUNED
from outrider.bench.peers.torchft_local_sgd import (
    TORCHFT_DILOCO,
    TORCHFT_DILOCO_TUNED,
    TORCHFT_LOCAL_SGD,
    TORCHFT_LOCAL_SGD_TUNED,
)

__all__ = ["PEERS", "PeerFramework", "obstacle"]

PEERS: dict[str, PeerFramework] = {
    peer.name: peer
    for peer in (
        DDP,
        DP,
        POST_LOCAL_SGD,
        POST_LOCAL_SGD_TUNED,
        ACCELERATE_LOCAL_SGD,
        ACCELERATE_LOCAL_SGD_TUNED,
        TORCHFT_LOCAL_SGD,
        TORCHFT_LOCAL_SGD_TUNED,
        TORCHFT_DILOCO,
        TORCHFT_DILOCO_TUNED,
    )
}
