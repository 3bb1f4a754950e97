"""The fixture that looks for what tests leave behind, seen acting on tests that do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

LEAKY_TESTS = """
import os, socket, subprocess, tempfile, threading

kept = []

def test_process():
    kept.append(subprocess.Popen(["sleep", "30"]))

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(30,), name="forgotten", daemon=True).start()

def test_variable():
    os.environ["FORGOTTEN"] = "1"

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_folder():
    kept.append(tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-"))

def test_tidy():
    with socket.create_server(("127.0.0.1", 0)):
        pass

def teardown_module():
    kept[0].kill()
    kept[0].wait()
    os.rmdir(kept[2])
"""


def test_every_kind_of_leak_is_told_and_a_tidy_test_passes(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text().replace("_PATIENCE_S = 3.0", "_PATIENCE_S = 0.1")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    told = [line.split(" ")[2] for line in ended.stdout.splitlines() if line.startswith("left behind: ")]
    assert told == ["processes", "threads", "variables", "ports", "folders"]
    assert "6 passed, 5 errors" in ended.stdout
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
