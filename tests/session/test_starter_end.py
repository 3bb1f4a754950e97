"""The process that only starts the ranks of a session ends there: its model was never trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import atexit, os, sys, threading
from pathlib import Path
import torch
import outrider

atexit.register(lambda: Path(f"exit-{os.getpid()}").touch())
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
model = torch.nn.Linear(4, 1)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def main():
    try:
        with outrider.Session(policy="balanced", devices="cpu,cpu@0.5", quiet=True) as s:
            s.prepare(model, optimizer)
            for batch in s.batches(torch.utils.data.TensorDataset(x), batch_size=16):
                s.step((model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean())
    finally:
        Path(f"finally-{os.getpid()}").touch()
        torch.save(model.state_dict(), "model.pt")

if sys.argv[1] == "thread":
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", how]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


@pytest.mark.slow
def test_what_a_script_does_in_finally_is_done_by_its_ranks_only(tmp_path: Path) -> None:
    done = run(tmp_path, "main")
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "model.pt")
    assert saved["weight"].abs().min() > 0
    assert len(list(tmp_path.glob("finally-*"))) == 2
    # What the starter itself has opened is closed as usual.
    assert len(list(tmp_path.glob("exit-*"))) == 3


def test_a_thread_cannot_start_ranks(tmp_path: Path) -> None:
    told = run(tmp_path, "thread").stderr
    assert (
        "a session on cpu,cpu@0.5 runs the script again on each device, and cannot begin that in a thread: the main "
        "thread would go on with a model that nobody trains\nhint: open it in the main thread, or start the script by "
        "`outrider run --devices cpu,cpu@0.5 script.py`"
    ) in told
