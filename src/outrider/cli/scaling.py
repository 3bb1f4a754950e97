"""`outrider bench scaling`: one device, DataParallel, DDP, FSDP2 and our policies on the same model and data.

Parses, calls, prints; the runs and the finding are in outrider.bench. Progress on stderr, the result on stdout.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import completion
from outrider.cli.console import check_torch, say
from outrider.cli.iteration import check_folder

if TYPE_CHECKING:
    from outrider.bench.scaling.scaling_plan import ScalingPlan
    from outrider.bench.scaling.scaling_record import ScalingRecord

EPILOG = "Example: outrider bench scaling --devices cuda:0,cuda:1 --model resnet34 --json scaling.json"


def scaling(
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="resnet18 and resnet34; may be repeated.")
    ] = None,
    devices: Annotated[
        str, typer.Option("--devices", metavar="LIST", autocompletion=completion.devices, help="Devices of the ranks.")
    ] = "auto",
    ways: Annotated[str | None, typer.Option("--ways", help="Comma list of dp, ddp, fsdp and policies; all.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples per device.")] = 512,
    epochs: Annotated[int, typer.Option("--epochs", help="Epochs of a run; the first is not counted.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds; each runs every way once.")] = 1,
    samples: Annotated[int | None, typer.Option("--samples", help="Samples of an epoch; all.")] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="FOLDER", help="Where CIFAR-10 is.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Where the runs go; runs/scaling-<time>.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record as well.")] = None,
) -> None:
    """Compare the ways to use several devices on ResNets and CIFAR-10, and say which to use here."""
    check_torch()
    from outrider.bench.scaling.scaling_measure import check_models
    from outrider.bench.scaling.scaling_plan import DEFAULT_MODELS, WAYS, ScalingPlan
    from outrider.machine.devices import cuda_devices, resolve_devices

    plan = ScalingPlan(
        models=tuple(model or DEFAULT_MODELS),
        devices=resolve_devices(devices, cuda_devices=cuda_devices()).devices,
        output=output or Path("runs") / f"scaling-{datetime.now():%Y%m%d-%H%M%S}",
        ways=WAYS if ways is None else tuple(name.strip() for name in ways.split(",")),
        batch_size=batch_size,
        epochs=epochs,
        rounds=rounds,
        samples=samples,
        data=data,
    )
    check_models(plan.models)
    check_folder(json_file)
    _run(plan, json_file)


def _run(plan: ScalingPlan, json_file: Path | None) -> None:
    from outrider.bench.scaling.scaling_measure import compare_ways
    from outrider.bench.scaling.scaling_record import document
    from outrider.bench.scaling.scaling_text import render
    from outrider.timeline.timeline_files import write_text

    def keep(record: ScalingRecord) -> None:
        if json_file is not None:
            write_text(json_file, json.dumps(document(record), indent=1))

    typer.echo(render(compare_ways(plan, tell=say, keep=keep)))
