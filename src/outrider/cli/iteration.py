"""`outrider bench iteration` and `outrider bench diff`: how long an iteration takes, and two such benchmarks compared.

Parses, calls, prints; outrider.bench decides what is measured and how. Progress goes to stderr, tables and comparisons
to stdout. `diff` needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import completion
from outrider.cli.console import EXIT_ERROR, check_torch, say
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.diff.compare import Comparison
    from outrider.bench.iteration.iteration_plan import IterationPlan
    from outrider.bench.iteration.iteration_record import ModelTimings
    from outrider.machine.devices import DeviceSpec
    from outrider.world.environment import Environment

EPILOG = "Example: outrider bench iteration --model resnet50 --devices cuda:0,cuda:1 --json now.json"


def iteration(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="A model of the zoo, or package.module:factory; may be repeated."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples per rank.")] = 32,
    image_size: Annotated[int, typer.Option("--image-size", help="Side of the images in pixels.")] = 224,
    bucket_size: Annotated[int, typer.Option("--bucket-size", metavar="MB", help="DDP's buckets.")] = 25,
    backend: Annotated[str, typer.Option("--backend", help="auto, nccl, or cpu (Gloo).")] = "auto",
    warmup: Annotated[int, typer.Option("--warmup", help="Iterations before measuring.")] = 5,
    iterations: Annotated[int, typer.Option("--iterations", help="Iterations measured in a round.")] = 10,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds, each in fresh processes.")] = 5,
    policy: Annotated[
        str, typer.Option("--policy", help="Our policies beside torch DDP, as a comma list: sync, balanced, …")
    ] = "sync",
    devices: Annotated[
        str, typer.Option("--devices", metavar="LIST", autocompletion=completion.devices, help="Devices of the ranks.")
    ] = "auto",
    is_compiled: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    execution: Annotated[
        str, typer.Option("--execution", help="How steps of our policies run: eager, compile, graph or auto.")
    ] = "eager",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16.")] = "fp32",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what PyTorch's own diff.py reads as well.")
    ] = None,
) -> None:
    """Measure the iteration time of models: one device without DDP, then torch DDP beside our policies."""
    check_torch()
    from outrider.bench.iteration.iteration_plan import DEFAULT_MODELS, IterationPlan
    from outrider.bench.iteration.iteration_text import library
    from outrider.bench.iteration.models import workload_named
    from outrider.world.environment import adopted

    environment = adopted()
    plan = IterationPlan(
        models=tuple(model or DEFAULT_MODELS),
        devices=_devices(devices, environment),
        policies=tuple(name.strip() for name in policy.split(",") if name.strip()),
        backend=backend,
        batch_size=batch_size,
        image_size=image_size,
        bucket_mb=bucket_size,
        warmup=warmup,
        iterations=iterations,
        rounds=rounds,
        precision=precision,
        is_compiled=is_compiled,
        execution=execution,
    )
    for name in plan.models:
        workload_named(name)
    library(plan)
    check_folder(json_file)
    _run(plan, environment, json_file)


def check_folder(path: Path | None) -> None:
    """Before anything is measured: an hour's work must not end at a folder that is not there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}", hint="make the folder first")


def _devices(devices: str, environment: Environment | None) -> tuple[DeviceSpec, ...]:
    from outrider.machine.devices import cuda_devices, resolve_devices
    from outrider.world.environment import local_devices

    if environment is not None:
        return local_devices(environment, devices, cuda_devices=cuda_devices())
    return resolve_devices(devices, cuda_devices=cuda_devices()).devices


def _run(plan: IterationPlan, environment: Environment | None, json_file: Path | None) -> None:
    from outrider.bench.iteration.iteration_measure import measure, measure_adopted
    from outrider.bench.iteration.machine_state import ProcessorTime, others_part

    before = ProcessorTime.now()
    if environment is None:
        models: list[ModelTimings] | None = measure(plan, tell=say)
        others = others_part(before, ProcessorTime.now())
    else:
        # Ranks that torchrun started are not ours to count.
        models, others = measure_adopted(plan, environment, tell=say), None
    # One voice is enough.
    if models is not None:
        _print(plan, models, others, json_file)


def _print(plan: IterationPlan, models: list[ModelTimings], others: float | None, json_file: Path | None) -> None:
    from outrider.bench.iteration.iteration_text import (
        header,
        iteration_document,
        library,
        overheads,
        render,
        surroundings,
    )
    from outrider.timeline.timeline_files import write_text

    facts = surroundings(plan, others)
    typer.echo(header(plan, facts, library(plan)))
    typer.echo(f"\n{render(models)}")
    for line in overheads(plan, models):
        typer.echo(line)
    if json_file is not None:
        write_text(json_file, json.dumps(iteration_document(plan, models, facts, library(plan)), indent=1))


DIFF_EPILOG = "Example: outrider bench diff before.json after.json --fail-above 3%"


def diff(
    baseline: Annotated[Path, typer.Argument(help="The file of the benchmark before.")],
    test: Annotated[Path, typer.Argument(help="The file of the benchmark after.")],
    fail_above: Annotated[
        str | None,
        typer.Option("--fail-above", metavar="PERCENT", help="Exit with 1 where p75 is slower by more, beyond chance."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    is_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the distributions.")
    ] = None,
) -> None:
    """Compare the iteration times in two files; positive differences are faster."""
    from outrider.bench.diff.compare import compare, parse_percent
    from outrider.bench.diff.diff_report import document, render, render_markdown, write_diff_page
    from outrider.bench.iteration.iteration_record import read_iterations

    limit = None if fail_above is None else parse_percent(fail_above)
    comparison = compare(read_iterations(baseline), read_iterations(test))
    if is_json:
        typer.echo(json.dumps(document(comparison), indent=1))
    else:
        typer.echo(render_markdown(comparison) if is_markdown else render(comparison))
    if html is not None:
        say(f"page: {write_diff_page(comparison, html)}")
    if limit is not None:
        _fail_above(comparison, limit)


def _fail_above(comparison: Comparison, limit_percent: float) -> None:
    slower = comparison.slower_than(limit_percent)
    for row in slower:
        say(f"slower by more than {limit_percent:g} %: {row.name}, p75 {row.change(75).faster_percent:+.1f} %")
    if slower:
        raise typer.Exit(EXIT_ERROR)
