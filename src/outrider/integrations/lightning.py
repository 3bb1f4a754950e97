"""Outrider inside Lightning: a strategy for the Trainer, and one for Fabric.

The names that users import. What a strategy does is in `lightning_trainer` and `lightning_fabric`.
"""

from __future__ import annotations

from outrider.integrations.lightning_fabric import OutriderFabricStrategy
from outrider.integrations.lightning_trainer import OutriderStrategy

__all__ = ["OutriderFabricStrategy", "OutriderStrategy"]
