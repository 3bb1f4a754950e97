"""The program of `watch=True`: serves the page of one run until its standard input is closed.

Decides how the page ends: with the process that started it, however that ends. Started by `watch_child`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from outrider.watch.watch_server import PORT, WatchServer, yield_to_training


def main() -> None:
    """Print the address, then serve the folder that is the only argument."""
    yield_to_training()
    server = WatchServer(Path(sys.argv[1]), port=PORT)
    print(server.address, flush=True)

    def end_with_starter() -> None:
        sys.stdin.buffer.read()
        server.stop()

    threading.Thread(target=end_with_starter, name="outrider-watch-end", daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
