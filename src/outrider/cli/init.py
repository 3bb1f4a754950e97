"""`outrider init`: a complete project in one command.

Parses, calls, prints; the project is made by outrider.scaffold. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import outrider
from outrider.cli import completion
from outrider.errors import ConfigError

# What the code of a template calls: a project that cannot run would be a poor start.
NEEDS = {"loop": "Session", "flow": "setup"}
EPILOG = "Example: outrider init stripes --template train && make -C stripes train"


def init(
    name: Annotated[str, typer.Argument(help="The name of the project and of its folder.")],
    template: Annotated[
        str,
        typer.Option(
            "--template",
            metavar="NAME",
            autocompletion=completion.templates,
            help="loop: your own loop, train: one call, flow: a network as a flow.",
        ),
    ] = "train",
    directory: Annotated[Path, typer.Option("--directory", help="The folder to make it in.")] = Path("."),
) -> None:
    """Make a project: training script, data, config, tests, Makefile, Dockerfile, job examples."""
    from outrider.scaffold.project import create_project

    _check_available(template)
    path = create_project(name, parent=directory, template=template)
    typer.echo(str(path))
    typer.echo(f"next: make -C {path} train", err=True)


def _check_available(template: str) -> None:
    needed = NEEDS.get(template)
    if needed is not None and needed not in outrider.__all__:
        raise ConfigError(
            f"template {template!r} needs outrider.{needed}, which version {outrider.__version__} does not have",
            hint="pass --template train",
        )
