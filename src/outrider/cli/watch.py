"""`outrider watch`: a page of a run, live and after its end.

Parses, calls, prints; the page is served by outrider.watch. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.errors import DataError

EPILOG = "Example: outrider watch runs"
RUNS = Path("runs")


def watch(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="The folder of a run, or of several; runs by default.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on loopback; 8377, or a free one if taken.")
    ] = None,
) -> None:
    """Show a running or finished run in the browser, on loopback only."""
    from outrider.watch.watch_server import PORT, WatchServer, yield_to_training

    if run is None and not RUNS.is_dir():
        raise DataError("no folder runs here", hint="pass the folder of a run, or change to the folder above runs")
    server = WatchServer(run or RUNS, port=port or PORT)
    typer.echo(server.address)
    typer.echo("open it in a browser; Ctrl-C ends it", err=True)
    yield_to_training()
    server.run()
