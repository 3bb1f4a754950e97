"""The command `outrider`: which subcommands there are, and how errors end the program.

Decides nothing else. The commands import what they need when they run, so that help needs no torch.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from outrider._version import __version__
from outrider.cli import (
    advise,
    bench,
    compare_policies,
    completion,
    demo,
    diagnose,
    init,
    replay,
    run,
    setup,
    simulate,
    timeline,
    torch,
    watch,
)
from outrider.cli.console import end_by_signal, guarded

EPILOG = "Start with: outrider demo"

# Plain help: readable in a pipe and without colour, and rich is not loaded for it.
app = typer.Typer(
    name="outrider",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    show_completion: Annotated[
        str | None,
        typer.Option(
            "--show-completion",
            metavar="SHELL",
            callback=completion.show,
            is_eager=True,
            autocompletion=completion.shells,
            help="Print the script that makes bash, zsh, fish or pwsh complete this command.",
        ),
    ] = None,
) -> None:
    """Train one PyTorch model on devices of unequal speed, so that every device gives what it can."""


app.command(epilog=demo.EPILOG, short_help="Compare all modes on two unequal devices, offline.")(demo.demo)
app.command(epilog=diagnose.EPILOG, short_help="What this machine has, and what works on it.")(diagnose.diagnose)
app.command(epilog=simulate.EPILOG, short_help="What given devices would gain under each policy.")(simulate.simulate)
app.command(
    epilog=advise.EPILOG, short_help="Whether the second device is worth it, and how.", context_settings=advise.CONTEXT
)(advise.advise)
app.command(
    epilog=compare_policies.EPILOG,
    short_help="Which policy reaches a target first, with your script.",
    context_settings=compare_policies.CONTEXT,
)(compare_policies.compare)
app.command(epilog=setup.EPILOG, short_help="Install the torch that fits all cards here.")(setup.setup)
app.command(epilog=init.EPILOG, short_help="Make a complete training project.")(init.init)
app.command(epilog=run.EPILOG, short_help="Run a script with this project's torch.", context_settings=run.CONTEXT)(
    run.run
)
app.add_typer(torch.app, name="torch", short_help="Torch builds side by side, one active per project.")
app.add_typer(bench.app, name="bench", short_help="Benchmark the suite's models in every mode, and report.")
app.command(epilog=timeline.EPILOG, short_help="What happened in a run, and files for other tools.")(timeline.timeline)
app.command(epilog=replay.EPILOG, short_help="Do a recorded run again, step by step.", context_settings=replay.CONTEXT)(
    replay.replay
)
app.command(epilog=watch.EPILOG, short_help="A page of a run in the browser, live.")(watch.watch)


def main() -> None:
    """Run the command line of this process."""
    completion.answer_shell()
    signal.signal(signal.SIGTERM, end_by_signal)
    sys.exit(guarded(app))
