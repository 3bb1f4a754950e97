"""The README keeps its word: it is short, its first example trains, and its links and named packages exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST_EXAMPLE = README.split("```python\n")[1].split("```")[0]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SUB_PACKAGES = sorted(path.parent.name for path in (ROOT / "src" / "outrider").glob("*/__init__.py"))
PAGES = sorted(ROOT.glob("docs/**/*.md"))


@pytest.mark.parametrize("name", SUB_PACKAGES)
def test_the_architecture_names_every_package(name: str) -> None:
    assert f"`{name}/`" in ARCHITECTURE


def test_the_architecture_draws_every_package() -> None:
    picture = ARCHITECTURE.split("```mermaid\n")[1].split("```")[0]
    drawn = set(re.findall(r"\w+", picture))
    assert [name for name in SUB_PACKAGES if name not in drawn] == []


def test_the_architecture_names_only_files_that_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE))
    assert named
    assert [path for path in sorted(named) if not (ROOT / "src" / "outrider" / path).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 9_000


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_first_example_trains_two_ranks(tmp_path: Path) -> None:
    assert len(FIRST_EXAMPLE.strip().splitlines()) <= 15
    assert 'devices="cpu,cpu@0.5"' in FIRST_EXAMPLE
    (tmp_path / "example.py").write_text(FIRST_EXAMPLE.replace("20_000", "2_000"))
    # The example sets one thread per rank: with the cores of rank 1, rank 0 would begin alone, and so short a run would
    # not try both.
    assert "threads_per_rank=1" in FIRST_EXAMPLE
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    epochs = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    losses = [float(loss) for loss, _, _ in epochs]
    shares = [[float(share) for share in shown.strip("()").split(",")] for _, _, shown in epochs]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    # A rank may rest after the first steps, where sharing them with it does not pay.
    assert all(len(by_rank) == 2 and sum(by_rank) == pytest.approx(1) for by_rank in shares)
    assert min(shares[0]) > 0
