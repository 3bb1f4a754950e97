"""The program of test_notebook_cells.py: cells in a real IPython shell that stands for the kernel of a notebook.

Only the connection to a browser is missing. Prints what the cells showed, as JSON in the last line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

DEFINITIONS = """
import torch, outrider
from torch import nn
inputs = torch.randn(4096, 8)
def make(): return nn.Linear(8, 2)
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
TRAIN = """
run = outrider.train(make, optimizer, loss, (inputs, (inputs.sum(1) > 0).long()), epochs=3, batch_size=16,
                     devices="cpu,cpu@0.4", run_dir="runs/mine")
for metrics in run:
    print("epoch", metrics.epoch)
run
"""
ONE_DEVICE = """
model = make()
s = outrider.Session(devices="cpu", run_dir="runs/loop").open()
s.prepare(model, optimizer(model.parameters()))
for x, y in s.batches((inputs, (inputs.sum(1) > 0).long()), batch_size=64):
    s.step(nn.functional.cross_entropy(model(x), y))
s.close()
s
"""
TWO_DEVICES = 'outrider.Session(devices="cpu,cpu@0.4").open()'


def shown(shell: InteractiveShell, publisher: CapturingDisplayPublisher, cell: str) -> dict[str, Any]:
    publisher.outputs.clear()
    done = shell.run_cell(cell)
    error = done.error_in_exec
    formats = {} if done.result is None else shell.display_formatter.format(done.result)[0]
    return {
        "error": None if error is None else str(error),
        "html": formats.get("text/html"),
        "outputs": [sorted(output["data"]) for output in publisher.outputs],
        "texts": [output["data"]["text/plain"] for output in publisher.outputs],
    }


def main() -> None:
    if "--without-widgets" in sys.argv:
        sys.modules["ipywidgets"] = None
    shell = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher()
    # The shell of a notebook belongs to a kernel; that of a terminal does not.
    shell.kernel, shell.display_pub = object(), publisher
    shell.run_cell(DEFINITIONS)
    cells = {"train": TRAIN} if "--without-widgets" in sys.argv else {
        "train": TRAIN, "loop": ONE_DEVICE, "two": TWO_DEVICES
    }  # fmt: skip
    print()
    print(json.dumps({name: shown(shell, publisher, cell) for name, cell in cells.items()}))


if __name__ == "__main__":
    main()
