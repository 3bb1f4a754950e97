"""The description of a peer: its name, its settings in words, how it is started, and why it may not run here.

Decides which devices a peer can use and the content of its run folder; its Method trains. Each peer's module creates
them, and `peer_table` lists them.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.api.handle import StartedRun
from outrider.api.options import CheckedRun
from outrider.api.train import make_sampler
from outrider.average.transport.backend_table import choose_backend
from outrider.bench.peers.method import OpenMethod
from outrider.bench.peers.peer_rank import run_peer_rank
from outrider.errors import ConfigError, DeviceError, OutriderError
from outrider.launch.forkserver import TRAINING
from outrider.launch.launcher import launch
from outrider.machine.devices import DeviceSpec, cuda_devices, resolve_devices
from outrider.rank.rank_life import RunSetting
from outrider.record import run_config as configs
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.replica import recipe as recipes
from outrider.world.messages import Message

INSTALL = "pip install 'outrider[peers]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFramework:
    """Another way to train on several devices, at one setting."""

    name: str
    title: str
    """What messages call it."""
    note: str
    """A description of the settings, for reports."""
    open_method: OpenMethod
    extra: str | None = None
    """The package it needs beyond torch."""
    install: str = INSTALL
    """The command that gets it."""
    processes: Literal["one per device", "one for all"] = "one per device"

    def start(self, order: CheckedRun, *, on_message: Callable[[Message], None] = lambda message: None) -> StartedRun:
        """Start its ranks; returns at once with the same handle as `train()`."""
        config = order.config
        assert config.run_dir is not None, "benchmarks name their run folders"
        specs = resolve_devices(config.devices, cuda_devices=cuda_devices()).devices
        setting = RunSetting(
            folder=config.run_dir,
            origin_s=time.time(),
            backend=_backend(self, specs),
            devices=tuple(str(spec) for spec in specs),
        )
        settings = recipes.settings(order.recipe) | configs.settings(config)
        options = settings | {"policy": self.name, "note": self.note}
        folder = _make_folder(setting, options)
        places = specs if self.processes == "one per device" else specs[:1]
        ranks = launch(
            run_peer_rank,
            {
                "open_method": self.open_method,
                "recipe": order.recipe,
                "setting": setting,
                "options": options,
                "timeout_s": config.timeout_s,
            },
            devices=places,
            log_dir=folder.path,
            port=config.port,
            imports=TRAINING,
            num_threads=config.threads_per_rank,
        )
        sampler = make_sampler(order, ranks, places, origin_s=setting.origin_s)
        return StartedRun(ranks, folder, on_message=on_message, sampler=sampler)


def obstacle(peer: PeerFramework, devices: Sequence[DeviceSpec]) -> str | None:
    """Why the peer cannot run on these devices here, in one line; None if it can."""
    try:
        _backend(peer, devices)
    except ConfigError as error:
        return f"{error.message}: {error.hint}"
    except OutriderError as error:
        return error.message
    return None


def _make_folder(setting: RunSetting, options: dict[str, object]) -> RunFolder:
    folder = RunFolder(setting.folder)
    folder.create()
    folder.write_json(
        "config.json",
        {
            "schema_version": SCHEMA_VERSION,
            "devices": setting.devices,
            "backend": setting.backend,
            "options": options,
        },
    )
    return folder


def _backend(peer: PeerFramework, specs: Sequence[DeviceSpec]) -> str:
    """Gloo between CPU ranks, NCCL between CUDA ranks; no peer has a way to join a mix of them."""
    if peer.extra is not None and importlib.util.find_spec(peer.extra) is None:
        raise ConfigError(f"{peer.extra} is not installed", hint=peer.install)
    if peer.processes == "one for all":
        return _backend_of_one_process(peer, specs)
    if all(spec.kind == "cpu" for spec in specs):
        return "cpu"
    if any(spec.kind != "cuda" for spec in specs):
        raise DeviceError(
            f"{peer.title} cannot join devices of different kinds: {', '.join(map(str, specs))}",
            hint=f"name only CPU ranks or only CUDA devices, or leave the mode {peer.name} out",
        )
    return choose_backend("nccl", specs).backend


def _backend_of_one_process(peer: PeerFramework, specs: Sequence[DeviceSpec]) -> str:
    whole = {spec.index for spec in specs if spec.kind == "cuda" and spec.share is None}
    if len(specs) < 2 or len(whole) < len(specs):
        raise DeviceError(
            f"{peer.title} needs two whole CUDA devices or more, got {', '.join(map(str, specs))}",
            hint=f"name CUDA devices only, or leave the mode {peer.name} out",
        )
    return "nccl"
