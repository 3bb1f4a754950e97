"""`outrider demo`: train one small model in every mode on two devices of unequal speed, and compare.

Parses, calls, prints; the modes and their table are in outrider.bench. Progress on stderr, the result on stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outrider.bench.demo_tasks import Demo
    from outrider.machine.devices import DeviceSpec

EPILOG = (
    "Example: outrider demo --devices cpu,cpu@0.4 --epochs 6. Outside of a terminal, and with --json, the last line of "
    "stdout is JSON."
)
BUSY_S = 0.5
"""How long the use of the processors by other programs is watched."""


def demo(
    devices: Annotated[str, typer.Option("--devices", help="Devices of the ranks.")] = "cpu,cpu@0.4",
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Epochs of each mode.")] = 6,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Where the runs go; runs/demo-<time>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End stdout with a line of JSON in a terminal too.")] = False,
) -> None:
    """Train a small model in every mode on two unequal devices, offline, and compare the modes."""
    from datetime import datetime

    from outrider.cli.console import EXIT_INTERRUPTED, check_torch, say

    check_torch()
    from outrider.bench.demo_tasks import default_output
    from outrider.machine.devices import cuda_devices, resolve_devices

    specs = resolve_devices(devices, cuda_devices=cuda_devices()).devices
    folder = output or default_output(datetime.now())
    try:
        finished = _run(specs, epochs, folder)
    except KeyboardInterrupt:
        say(_interrupted(folder, len(specs)))
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print(finished, has_json=as_json or not _is_terminal())


def _run(specs: tuple[DeviceSpec, ...], epochs: int, folder: Path) -> Demo:
    from outrider.bench.demo_tasks import busy_words, conditions, crowding, rank_words, run_demo
    from outrider.bench.tasks import demo_task
    from outrider.cli.console import say
    from outrider.cli.progress import open_watcher
    from outrider.machine.devices import num_cores

    task = demo_task(epochs=epochs)
    say(conditions(task))
    say(f"devices {', '.join(map(str, specs))}: {rank_words(specs)}")
    for warning in (crowding(specs, num_cores()), busy_words(_used_by_others())):
        if warning:
            say(warning)
    with open_watcher(epochs) as watcher:
        return run_demo(task, devices=specs, output=folder, watcher=watcher)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _used_by_others() -> float | None:
    """The part of the processors that other programs use now."""
    import time

    from outrider.bench.iteration.machine_state import ProcessorTime, others_part

    before = ProcessorTime.now()
    time.sleep(BUSY_S)
    return others_part(before, ProcessorTime.now())


def _print(finished: Demo, *, has_json: bool) -> None:
    import json

    from outrider.bench.demo_tasks import document, next_steps, render
    from outrider.cli.console import say

    typer.echo()
    typer.echo(render(finished))
    if has_json:
        typer.echo(json.dumps(document(finished), allow_nan=False))
    say(next_steps(finished))


def _interrupted(folder: Path, num_devices: int) -> str:
    from outrider.bench.demo_tasks import finished_modes

    modes = finished_modes(folder, num_devices)
    if not modes:
        return "interrupted before the first run was finished"
    return f"interrupted; finished runs ({', '.join(modes)}) are in {folder}"
