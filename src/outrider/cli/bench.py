"""`outrider bench`: train the suite's models in every mode, report the results, compare them with a baseline.

Parses, calls, prints; outrider.bench runs and reports. Progress on stderr, results on stdout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import completion, iteration, scaling
from outrider.cli.console import EXIT_ERROR, EXIT_INTERRUPTED, check_torch, say
from outrider.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from outrider.bench.suite.run_case import Planned
    from outrider.bench.suite.runs import SuiteRun
    from outrider.bench.suite.suite_plan import Preset, SuiteRequest
    from outrider.bench.suite.sweep import Swept

EPILOG = "Example: outrider bench sweep --preset quick && outrider bench report runs"
app = typer.Typer(
    no_args_is_help=True, epilog=EPILOG, help="Eight models in every mode, and a report of what came of it."
)

_Data = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where data sets lie; looked at first.")]
_Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where the runs go.")]
_Seeds = Annotated[int | None, typer.Option("--seeds", min=1, metavar="N", help="Runs of each mode, by seed.")]
_Epochs = Annotated[
    int | None, typer.Option("--epochs", min=1, metavar="N", help="Epochs; the model's own if left out.")
]
_Devices = Annotated[
    str | None,
    typer.Option("--devices", metavar="LIST", autocompletion=completion.devices, help="Devices of the ranks."),
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An option of the core, overhead_target=0.05; may be repeated."),
]
_BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, metavar="N", help="Samples per rank and step.")]
_Samples = Annotated[
    int | None, typer.Option("--samples", min=1, metavar="N", help="Only the first N of each data set.")
]
_Jobs = Annotated[
    int, typer.Option("--jobs", min=1, metavar="N", help="Runs at a time; with more than one none is timed.")
]
_Depth = Annotated[int | None, typer.Option("--depth", metavar="N", help="Of the ResNets, 6n + 2; 20 if left out.")]


@app.command("list", epilog="Example: outrider bench list --devices cpu,cpu@0.4")
def list_suite(devices: _Devices = None) -> None:
    """Show the models, the devices here, and which modes can run on them."""
    check_torch()
    from outrider.bench.suite.listing import render_list

    typer.echo(render_list(_specs(devices)))


@app.command(epilog="Example: outrider bench run --model lenet --mode cpu-async --devices cpu,cpu@0.4 --seeds 3")
def run(
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="A model of `outrider bench list`.")],
    mode: Annotated[str, typer.Option("--mode", metavar="NAME", help="A mode of `outrider bench list`.")],
    data: _Data = None,
    output: _Output = Path("runs"),
    seeds: _Seeds = None,
    epochs: _Epochs = None,
    devices: _Devices = None,
    settings: _Set = None,
    batch_size: _BatchSize = None,
    samples: _Samples = None,
    depth: _Depth = None,
    jobs: _Jobs = 1,
) -> None:
    """Train one model in one mode; the last line of stdout is JSON."""
    check_torch()
    from outrider.bench.suite.suite_plan import Preset, plan

    alone = Preset(models=(model,), modes=(mode,), num_seeds=1, devices=None)
    request = _request(
        alone, data=data, seeds=seeds, epochs=epochs, devices=devices, settings=settings,
        batch_size=batch_size, samples=samples, depth=depth, jobs=jobs,
    )  # fmt: skip
    _carry_out(plan(request), output, num_jobs=jobs)


@app.command(epilog="Example: outrider bench sweep --preset quick")
def sweep(
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="quick (minutes) or full (days).")] = "quick",
    models: Annotated[str | None, typer.Option("--models", metavar="LIST", help="Models, as a comma list.")] = None,
    modes: Annotated[str | None, typer.Option("--modes", metavar="LIST", help="Modes, as a comma list.")] = None,
    data: _Data = None,
    output: _Output = Path("runs"),
    seeds: _Seeds = None,
    epochs: _Epochs = None,
    devices: _Devices = None,
    settings: _Set = None,
    batch_size: _BatchSize = None,
    samples: _Samples = None,
    depth: _Depth = None,
    jobs: _Jobs = 1,
) -> None:
    """Train models in modes, round by round; continues where it stopped and skips finished runs.

    The preset supplies the options that you leave out. Ctrl-C keeps finished runs. The last line of stdout is JSON.
    """
    check_torch()
    from outrider.bench.suite.suite_plan import plan, preset_named

    chosen = preset_named(preset)
    chosen = replace(chosen, models=_names(models) or chosen.models, modes=_names(modes) or chosen.modes)
    request = _request(
        chosen, data=data, seeds=seeds, epochs=epochs, devices=devices, settings=settings,
        batch_size=batch_size, samples=samples, depth=depth, jobs=jobs,
    )  # fmt: skip
    _carry_out(plan(request), output, num_jobs=jobs)


@app.command(epilog="Example: outrider bench report runs --html")
def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of a sweep.")],
    html: Annotated[bool, typer.Option("--html", help="Write report.html as well.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Where the report goes; RUNS if left out.")
    ] = None,
) -> None:
    """Report on finished runs: markdown on stdout and in report.md. Needs no torch."""
    from outrider.bench.report.markdown import make_report, markdown
    from outrider.timeline.timeline_files import write_text

    made = make_report(runs)
    folder = _made_folder(output or runs)
    text = markdown(made)
    write_text(folder / "report.md", text)
    say(f"report: {folder / 'report.md'}")
    if html:
        from outrider.bench.report.report_page import write_report_page

        say(f"page: {write_report_page(made, folder)}")
    # Last: `| head` closes its end early.
    typer.echo(text, nl=False)


@app.command(epilog="Example: outrider bench validate --baseline baseline.json")
def validate(
    baseline: Annotated[Path, typer.Option("--baseline", metavar="FILE", help="The baseline to compare with.")],
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of a sweep.")] = Path("runs"),
    save: Annotated[bool, typer.Option("--save", help="Make these runs the baseline instead.")] = False,
) -> None:
    """Compare finished runs with a saved baseline: exit code 1 on a regression, never on an improvement.

    Needs no torch.
    """
    from outrider.bench.report.validate import make_baseline
    from outrider.bench.suite.groups import group_runs
    from outrider.bench.suite.runs import read_runs

    groups = group_runs(read_runs(runs))
    if save:
        _save_baseline(make_baseline(groups), baseline)
        return
    _compare(groups, baseline)


@app.command(epilog="Example: outrider bench rerun runs/lenet/cpu-async/seed-0-1a2b3c4d5e")
def rerun(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of one run of the suite.")],
    data: _Data = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="The new run's folder; DIR-rerun if left out.")
    ] = None,
) -> None:
    """Run one run again from its config.json, and put both side by side; the last line of stdout is JSON."""
    before = _run_in(run_dir)
    check_torch()
    from outrider.bench.datasets.source import DataSource
    from outrider.bench.suite.suite_plan import plan_again
    from outrider.bench.suite.suite_text import render_again

    planned = plan_again(before.case, data=DataSource(folder=data))
    now = _run_again(planned, output or _free(run_dir.with_name(f"{run_dir.name}-rerun")))
    typer.echo(render_again(before, now))
    _print_document([now], failures=())


# Shared by the commands


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _specs(devices: str | None) -> tuple[Any, ...]:
    from outrider.bench.suite.suite_plan import default_devices
    from outrider.machine.devices import cuda_devices, resolve_devices

    return resolve_devices(devices or default_devices(cuda_devices()), cuda_devices=cuda_devices()).devices


def _request(
    preset: Preset,
    *,
    data: Path | None,
    seeds: int | None,
    epochs: int | None,
    devices: str | None,
    settings: list[str] | None,
    batch_size: int | None,
    samples: int | None,
    depth: int | None,
    jobs: int,
) -> SuiteRequest:
    """Options of the user override those of the preset."""
    from outrider.bench.datasets.source import DataSource
    from outrider.bench.suite.setting_options import parse_settings
    from outrider.bench.suite.suite_plan import SuiteRequest, runnable_modes

    specs = _specs(devices or preset.devices)
    return SuiteRequest(
        models=preset.models,
        modes=preset.modes or runnable_modes(specs),
        devices=specs,
        data=DataSource(folder=data, max_samples=samples),
        num_seeds=seeds or preset.num_seeds,
        epochs=epochs or preset.epochs,
        batch_size=batch_size,
        depth=depth,
        max_samples={} if samples else preset.max_samples,
        settings=parse_settings(settings or [], num_devices=len(specs)),
        is_timed=jobs == 1,
    )


def _carry_out(planned: list[Planned], output: Path, *, num_jobs: int) -> None:
    try:
        swept = _sweep(planned, output, num_jobs=num_jobs)
    except KeyboardInterrupt:
        say(_interrupted(planned, output))
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print(swept)
    if swept.failures:
        raise typer.Exit(EXIT_ERROR)


def _sweep(planned: list[Planned], output: Path, *, num_jobs: int) -> Swept:
    from outrider.bench.suite.sweep import in_rounds, run_sweep, run_sweep_beside
    from outrider.cli.bench_progress import open_sweep_watcher

    with open_sweep_watcher([one.case for one in in_rounds(planned)], num_jobs=num_jobs) as watcher:
        if num_jobs == 1:
            swept = run_sweep(planned, output=output, watcher=watcher)
        else:
            swept = run_sweep_beside(planned, output=output, watcher=watcher, num_jobs=num_jobs)
        watcher.finish()
    return swept


def _interrupted(planned: list[Planned], output: Path) -> str:
    from outrider.bench.suite.run_case import finished_run

    finished = sum(finished_run(output / one.case.folder, one) is not None for one in planned)
    done = f"{finished} of {len(planned)} runs are finished"
    return f"interrupted; {done} and in {output}, the same command goes on from there"


def _print(swept: Swept) -> None:
    from outrider.bench.suite.suite_text import render_runs

    try:
        if swept.runs:
            typer.echo(render_runs(swept.runs))
    except MissingExtraError as error:
        # The runs are on disk: a machine with scipy can make the report.
        say(f"no table: {error.message}; {error.hint}, then `outrider bench report`")
    failures = [f"{case.title} {case.mode} seed {case.seed}: {error.message}" for case, error in swept.failures]
    for failure in failures:
        typer.echo(f"failed: {failure}")
    _print_document(swept.runs, failures=failures)


def _print_document(runs: Any, *, failures: Any) -> None:
    from outrider.bench.suite.suite_text import runs_document

    typer.echo(json.dumps(runs_document(runs, failures=failures), allow_nan=False))


def _made_folder(folder: Path) -> Path:
    from outrider.timeline.timeline_files import explained

    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _save_baseline(content: dict[str, Any], path: Path) -> None:
    from outrider.timeline.timeline_files import write_text

    write_text(path, json.dumps(content, indent=1) + "\n")
    num_modes = sum(len(model["modes"]) for model in content["models"].values())
    say(f"saved {num_modes} modes of {len(content['models'])} models in {path}")


def _compare(groups: Any, path: Path) -> None:
    from outrider.bench.report.validate import REGRESSION, compare, read_baseline, render_comparisons
    from outrider.bench.suite.runs import read_json

    content = read_json(path)
    if content is None:
        raise ConfigError(f"there is no baseline {path}", hint="make these runs the baseline with --save")
    baseline = read_baseline(content, name=str(path))
    comparisons = compare(groups, baseline)
    typer.echo(render_comparisons(comparisons, baseline=baseline))
    if any(one.verdict == REGRESSION for one in comparisons):
        raise typer.Exit(EXIT_ERROR)


def _run_in(folder: Path) -> SuiteRun:
    from outrider.bench.suite.runs import read_run

    run = read_run(folder)
    if run is None:
        raise ConfigError(
            f"{folder} holds no run of the suite", hint="pass a folder such as runs/lenet/cpu-async/seed-0-…"
        )
    return run


def _run_again(planned: Planned, folder: Path) -> SuiteRun:
    from outrider.bench.suite.run_case import run_case
    from outrider.cli.bench_progress import open_sweep_watcher

    say(f"run: {folder}")
    with open_sweep_watcher([planned.case]) as watcher:
        watcher.begin(planned.case)
        run = run_case(planned, folder, on_message=partial(watcher.saw, planned.case))
        watcher.ended(run)
    return run


def _free(folder: Path) -> Path:
    """The folder, or the next one that is not there."""
    number = 2
    free = folder
    while free.exists():
        free = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return free


app.command(epilog=iteration.EPILOG)(iteration.iteration)
app.command(epilog=iteration.DIFF_EPILOG)(iteration.diff)
app.command(epilog=scaling.EPILOG)(scaling.scaling)
