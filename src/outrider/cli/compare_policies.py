"""`outrider compare`: a user's own script in several policies, until a target is reached.

Parses, calls, prints; the runs and the statistics are in outrider.bench.comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import completion
from outrider.cli.console import check_torch, say

EPILOG = 'Example: outrider compare train.py --devices cpu,cpu@0.4 --target "eval>=0.97" -- --lr 0.1'
CONTEXT = {"allow_extra_args": True}
"""What follows `--` belongs to the script."""


def compare(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The Python script; its own arguments follow after --.")],
    target: Annotated[
        str, typer.Option("--target", metavar="METRIC>=VALUE", help='Such as "eval>=0.97", "eval<=0.5", "loss<=0.2".')
    ],
    policies: Annotated[
        str, typer.Option("--policies", metavar="LIST", help="Policies; solo is the first device alone.")
    ] = "solo,sync,balanced,async",
    devices: Annotated[
        str,
        typer.Option(
            "--devices", metavar="LIST", autocompletion=completion.devices, help="Devices of the ranks; auto for all."
        ),
    ] = "auto",
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each policy, by seed.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Folder of the comparison; runs/compare-SCRIPT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Run a script in each policy, and say which one reaches the target first.

    An interrupted comparison goes on where it stopped.
    """
    check_torch()
    from outrider.api.script_run import UserCommand
    from outrider.bench.comparison import comparison_runs, comparison_text
    from outrider.bench.statistics import scipy_stats

    command = UserCommand(script=script, arguments=tuple(context.args))
    comparison = comparison_runs.PolicyComparison.make(
        command, policies=policies, devices=devices, target=target, seeds=seeds, folder=output
    )
    # Not only after hours of runs.
    scipy_stats()
    runs = comparison_runs.run_comparison(comparison, tell=say)
    if as_json:
        typer.echo(json.dumps(comparison_text.as_document(comparison, runs), indent=1))
    else:
        typer.echo(comparison_text.as_text(comparison, runs))
