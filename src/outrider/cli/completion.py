"""Shell completion: the script for a shell, and the values of options that are cheap to compute.

Decides which values are offered; typer speaks with the shells. Called by main, and by the commands for their options.
"""

from __future__ import annotations

import os

import typer

from outrider.errors import ConfigError, one_of

SHELLS = ("bash", "zsh", "fish", "pwsh")
PROGRAM = "outrider"
INSTRUCTION = "_OUTRIDER_COMPLETE"
"""The variable by which a shell asks this program to complete instead of to run."""


def answer_shell() -> None:
    """Set typer up to answer a completion request of a shell; otherwise do nothing, to keep start-up fast."""
    if INSTRUCTION in os.environ:
        from typer._completion_classes import completion_init

        completion_init()


def show(shell: str | None) -> None:
    """Print the script that makes a shell complete this command, and exit."""
    if shell is not None:
        from typer._completion_shared import get_completion_script

        if shell not in SHELLS:
            raise ConfigError(f"unknown shell {shell!r}", hint=one_of(shell, SHELLS, what="shells"))
        typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=INSTRUCTION, shell=shell))
        raise typer.Exit


def shells(incomplete: str) -> list[str]:
    """The shells that can be taught to complete."""
    return _beginning(incomplete, SHELLS)


def devices(incomplete: str) -> list[str]:
    """Devices of this machine, also as the next of a list."""
    from outrider.machine.devices import cuda_devices

    written, comma, begun = incomplete.rpartition(",")
    known = ("cpu", "cpu@0.5", *cuda_devices())
    return [f"{written}{comma}{name}" for name in _beginning(begun, known if comma else ("auto", *known))]


def variants(incomplete: str) -> list[str]:
    """The torch variants that are installed."""
    from outrider.machine.variants import VariantStore

    return _beginning(incomplete, VariantStore.of_user().names())


def backends(incomplete: str) -> list[str]:
    """The torch builds that can be installed."""
    from outrider.machine.wheels import load_table

    table = load_table()
    wheels = (wheel.backend for wheel in table.of_version(table.preferred))
    return _beginning(incomplete, ("auto", "cpu", *wheels, table.rocm.backend))


def versions(incomplete: str) -> list[str]:
    """The torch versions that the wheel table knows."""
    from outrider.machine.wheels import load_table

    return _beginning(incomplete, load_table().versions())


def ways(incomplete: str) -> list[str]:
    """The ways of `outrider setup`."""
    from outrider.machine.torch_choice import WAYS

    return _beginning(incomplete, WAYS)


def templates(incomplete: str) -> list[str]:
    """The templates of `outrider init`."""
    from outrider.scaffold.project import TEMPLATES

    return _beginning(incomplete, TEMPLATES)


def _beginning(incomplete: str, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
