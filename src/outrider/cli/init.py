"""`outrider init`: a complete project in one command.

Parses, calls, prints; the project is made by outrider.scaffold. Needs no torch.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import completion

EPILOG = "Example: outrider init stripes --template loop && make -C stripes train"


def init(
    name: Annotated[str, typer.Argument(help="The name of the project and of its folder.")],
    template: Annotated[
        str,
        typer.Option(
            "--template",
            metavar="NAME",
            autocompletion=completion.templates,
            help="loop: your own loop, train: one call, flow: a network as a flow, ray: workers of Ray Train.",
        ),
    ] = "loop",
    directory: Annotated[Path, typer.Option("--directory", help="The folder to make it in.")] = Path("."),
) -> None:
    """Make a project: training script, data, config, tests, Makefile, Dockerfile, job examples."""
    from outrider.scaffold.project import create_project

    path = create_project(name, parent=directory, template=template)
    typer.echo(str(path))
    if template == "ray" and importlib.util.find_spec("ray") is None:
        typer.echo('ray is not installed here: pip install "outrider[ray]"', err=True)
    typer.echo(f"next: make -C {shlex.quote(str(path))} train", err=True)
