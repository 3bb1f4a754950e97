"""The versions of Outrider, torch and Python that each rank runs. Ranks of one world may have different torch builds.

Decides which versions work together. Called by the world when ranks meet.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider._version import __version__
from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBuild:
    """The versions of one rank."""

    outrider: str
    torch: str
    python: str


def build_here() -> RankBuild:
    return RankBuild(outrider=__version__, torch=torch.__version__, python=platform.python_version())


def refuse_different_outriders(builds: Sequence[RankBuild]) -> None:
    """Raise if Outrider versions differ, because the format of exchanged data depends on the version."""
    for rank, build in enumerate(builds):
        if build.outrider != builds[0].outrider:
            raise ConfigError(
                f"rank {rank} runs Outrider {build.outrider}, rank 0 {builds[0].outrider}: they cannot work together",
                hint="install the same version of Outrider in all environments",
                rank=rank,
            )
