"""Outrider and what it imports, where all frameworks are installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import outrider
from outrider import Session, train
frameworks = "transformers accelerate peft lightning pytorch_lightning ray datasets webdataset wandb mlflow trackio"
print([name for name in f"{frameworks} tensorboard ipywidgets IPython timm trl".split() if name in sys.modules])
"""


def test_outrider_imports_no_framework() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
