"""Stands in for nvidia-cuda-mps-control: the same arguments, questions and files, without a GPU.

Not a test itself. It keeps a journal at $FAKE_MPS_JOURNAL, and $FAKE_MPS makes it refuse, keep silent, or not go.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

PIPES = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
# A daemon that somebody else started is found by its pipes alone.
LOGS = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/nowhere"))
ADDRESS = str(PIPES / "control")
MOOD = os.environ.get("FAKE_MPS", "")


def journal(line: str) -> None:
    with open(os.environ["FAKE_MPS_JOURNAL"], "a") as file:
        file.write(line + "\n")


def start() -> int:
    if MOOD == "refuses":
        (LOGS / "control.log").write_text("Starting control daemon\nFailed to open the device\n")
        print("Cannot start")
        return 1
    if os.fork():
        while MOOD != "silent" and not os.path.exists(ADDRESS):
            time.sleep(0.01)
        return 0
    os.setsid()
    if MOOD != "silent" and not os.fork():
        serve()
    os._exit(0)


def serve() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(ADDRESS + ".new")
        listener.listen()
        choices = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")}
        journal(f"up {os.getpid()} {sorted(name for name, value in choices.items() if value)}")
        os.rename(ADDRESS + ".new", ADDRESS)
        while True:
            caller, _ = listener.accept()
            with caller:
                command = caller.recv(100).decode().strip()
                caller.sendall(b"\n")
            if command == "quit":
                journal("quit")
                if MOOD != "deaf":
                    return


def ask() -> int:
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(ADDRESS)
        except OSError:
            print("Cannot find MPS control daemon process")
            return 1
        caller.sendall(sys.stdin.readline().encode())
        caller.recv(100)
    return 0


if __name__ == "__main__":
    sys.exit(start() if sys.argv[1:] == ["-d"] else ask())
