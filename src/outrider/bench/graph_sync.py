"""Mode `graph-sync`: a network written as a flow, trained in a user's own loop through `outrider.setup`.

Decides the loop that a user would write; devices, data, schedule and evaluation are those of the other modes.
Called by the modes; its records have the same format as those of other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.api.graph_setup import setup
from outrider.api.handle import StartedRun
from outrider.api.options import CheckedRun, SessionOptions, make_session_order
from outrider.api.session import Session
from outrider.average.transport.backend_table import choose_backend
from outrider.launch.forkserver import TRAINING
from outrider.launch.launcher import launch
from outrider.launch.script_launcher import take_part
from outrider.machine.devices import cuda_devices, resolve_devices
from outrider.record import run_config as configs
from outrider.record.epoch_metrics import as_json
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.replica import recipe as recipes
from outrider.replica.recipe import Recipe
from outrider.replica.tuning import autocast, to_channels_last
from outrider.world.messages import Link, Message


def start_graph_sync(order: CheckedRun, *, on_message: Callable[[Message], None] = lambda message: None) -> StartedRun:
    """Start one rank per device, each running the loop; returns at once with the same handle as `train()`."""
    config = order.config
    assert config.run_dir is not None, "benchmarks name their run folders"
    specs = resolve_devices(config.devices, cuda_devices=cuda_devices()).devices
    backend = choose_backend(config.backend, specs).backend
    devices = tuple(str(spec) for spec in specs)
    session_options = _session_options(order)
    options = recipes.settings(order.recipe) | configs.settings(config)
    folder = RunFolder(config.run_dir)
    folder.create()
    folder.write_json(
        "config.json", {"schema_version": SCHEMA_VERSION, "devices": devices, "backend": backend, "options": options}
    )
    ranks = launch(
        run_loop,
        {"recipe": order.recipe, "options": session_options, "run_dir": config.run_dir},
        devices=specs,
        log_dir=folder.path,
        port=config.port,
        imports=TRAINING,
        num_threads=config.threads_per_rank,
    )
    return StartedRun(ranks, folder, on_message=on_message)


def _session_options(order: CheckedRun) -> dict[str, Any]:
    """The options for the session, checked before any process starts; options of data go to its loop."""
    given = recipes.plain(order.recipe) | configs.plain(order.config)
    options = {name: value for name, value in given.items() if name in SessionOptions.__annotations__}
    make_session_order(options)
    return options


def run_loop(link: Link, *, recipe: Recipe, options: dict[str, Any], run_dir: Path) -> None:
    """The function of each process: runs the user's loop and sends the epochs to the starter."""
    take_part(link, run_dir=run_dir)
    assert isinstance(recipe.precision, str), "benchmarks have one precision for all ranks"
    torch.manual_seed(recipe.seed)
    graph = recipe.model if isinstance(recipe.model, torch.nn.Module) else recipe.model()
    if recipe.memory_format == "channels_last":
        to_channels_last(graph)
    with setup(graph, optimizer=recipe.optimizer, scheduler=recipe.scheduler, **options) as session:
        for _ in _told_epochs(session, recipe.epochs, link):
            for batch in session.batches(recipe.dataset, batch_size=recipe.mean_batch_size, augment=recipe.augment):
                with autocast(recipe.precision, session.device):
                    loss = recipe.step(graph, batch)
                session.step(loss)
            if recipe.evaluate is not None:
                with autocast(recipe.precision, session.device):
                    session.evaluate_together(recipe.evaluate, recipe.eval_dataset)
        if session.is_main:
            RunFolder(run_dir).write_model(graph.state_dict())


def _told_epochs(session: Session, count: int, link: Link) -> Iterator[int]:
    """Count epochs as the session does; an epoch's metrics are there once the next one was asked for.

    There are none before the first epoch, also where that goes on from a checkpoint.
    """
    for epoch in session.epochs(count):
        _tell(session, link)
        yield epoch
    _tell(session, link)


def _tell(session: Session, link: Link) -> None:
    if session.is_main and session.metrics is not None:
        link.send("epoch", **as_json(session.metrics))
