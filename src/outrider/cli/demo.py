"""`outrider demo`: train one small model in every mode on two devices of unequal speed, and compare.

Parses, calls, prints; the modes and their table are in outrider.bench. Progress on stderr, the result on stdout.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outrider.bench.demo import Demo
    from outrider.machine.devices import DeviceSpec

EPILOG = "Example: outrider demo --devices cpu,cpu@0.4 --epochs 8. The last line of stdout is JSON."


def demo(
    devices: Annotated[str, typer.Option("--devices", help="Devices of the ranks.")] = "cpu,cpu@0.4",
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Epochs of each mode.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Where the runs go; runs/demo-<time>.")
    ] = None,
) -> None:
    """Train a small model in every mode, offline, and show what each makes of two unequal devices."""
    from datetime import datetime

    from outrider.cli.console import EXIT_INTERRUPTED, check_torch, say

    check_torch()
    from outrider.bench.demo import default_output
    from outrider.machine.devices import cuda_devices, resolve_devices

    specs = resolve_devices(devices, cuda_devices=cuda_devices()).devices
    folder = output or default_output(datetime.now())
    try:
        finished = _run(specs, epochs, folder)
    except KeyboardInterrupt:
        say(_interrupted(folder, len(specs)))
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print(finished)


def _run(specs: tuple[DeviceSpec, ...], epochs: int, folder: Path) -> Demo:
    from outrider.bench.demo import conditions, crowding, rank_words, run_demo
    from outrider.bench.tasks import demo_task
    from outrider.cli.console import say
    from outrider.cli.progress import open_watcher
    from outrider.machine.devices import num_cores

    task = demo_task(epochs=epochs)
    say(conditions(task))
    say(f"devices {', '.join(map(str, specs))}: {rank_words(specs)}")
    if crowded := crowding(specs, num_cores()):
        say(crowded)
    with open_watcher(epochs) as watcher:
        return run_demo(task, devices=specs, output=folder, watcher=watcher)


def _print(finished: Demo) -> None:
    import json

    from outrider.bench.demo import document, render

    typer.echo()
    typer.echo(render(finished))
    typer.echo(json.dumps(document(finished), allow_nan=False))


def _interrupted(folder: Path, num_devices: int) -> str:
    from outrider.bench.demo import finished_modes

    modes = finished_modes(folder, num_devices)
    if not modes:
        return "interrupted before the first run was finished"
    return f"interrupted; finished runs ({', '.join(modes)}) are in {folder}"
