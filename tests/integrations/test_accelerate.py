"""Scripts of accelerate with the Accelerator of a session, on ranks of unequal speed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.hf_ranks import run_ranks

from outrider.integrations.accelerate import Accelerator
from outrider.integrations.accelerate_loaders import PreparedSchedule
from outrider.integrations.hf_steps import StepCount

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS, THEIRS = "from outrider.integrations.accelerate import Accelerator", "from accelerate import Accelerator"
UNEQUAL = "cpu,cpu@0.4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    accuracy: float
    count: int
    rate: float


def run(script: Path, *arguments: str, folder: Path, devices: str = "cpu") -> list[Epoch]:
    """The epochs that a script prints on rank 0; the other ranks print nothing."""
    printed, *others = run_ranks("script", folder=folder, devices=devices, path=str(script), arguments=list(arguments))
    assert not any(others)
    lines = re.findall(r"epoch \d+: accuracy ([\d.]+) of (\d+), rate ([\d.]+)", printed)
    return [Epoch(accuracy=float(one[0]), count=int(one[1]), rate=float(one[2])) for one in lines]


def before(name: str, folder: Path) -> Path:
    """The script as it was: with accelerate's own Accelerator."""
    path = folder / f"{name}_before.py"
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count(OURS) == 1
    path.write_text(text.replace(OURS, THEIRS))
    return path


@pytest.fixture(scope="module")
def cv_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cv")


@pytest.fixture(scope="module")
def cv(cv_folder: Path) -> list[Epoch]:
    return run(EXAMPLES / "accelerate_cv.py", folder=cv_folder, devices=UNEQUAL)


def check_equal(ranks: list[Epoch], plain: list[Epoch], *, count: int) -> None:
    assert [epoch.count for epoch in ranks] == [count] * 3
    assert [epoch.rate for epoch in ranks] == pytest.approx([epoch.rate for epoch in plain], abs=1e-6)
    # One sample near the boundary may fall on the other side by rounding.
    assert [epoch.accuracy for epoch in ranks] == pytest.approx([epoch.accuracy for epoch in plain], abs=1.1 / count)
    assert ranks[-1].accuracy > 0.7


def test_two_ranks_classify_images_as_accelerate_does_on_one_device(cv: list[Epoch], tmp_path: Path) -> None:
    check_equal(cv, run(before("accelerate_cv", tmp_path), folder=tmp_path), count=150)


def test_two_ranks_classify_text_as_accelerate_does_on_one_device(tmp_path: Path) -> None:
    plain = run(before("accelerate_nlp", tmp_path), folder=tmp_path / "plain")
    ranks = run(EXAMPLES / "accelerate_nlp.py", folder=tmp_path / "ranks", devices=UNEQUAL)
    check_equal(ranks, plain, count=101)


def test_a_saved_state_goes_on_with_another_number_of_ranks(cv: list[Epoch], cv_folder: Path, tmp_path: Path) -> None:
    checkpoint = str(cv_folder / "checkpoints" / "epoch_0")
    resumed = run(EXAMPLES / "accelerate_cv.py", "--resume_from_checkpoint", checkpoint, folder=tmp_path)
    assert [epoch.rate for epoch in resumed] == [epoch.rate for epoch in cv[1:]]
    assert [epoch.accuracy for epoch in resumed] == pytest.approx([epoch.accuracy for epoch in cv[1:]], abs=0.01)


@pytest.mark.parametrize("name", ["accelerate_nlp", "accelerate_cv"])
def test_the_changed_line_of_the_examples_is_that_of_the_guide(name: str) -> None:
    guide = (EXAMPLES.parent / "docs" / "adopting.md").read_text()
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    code = "\n".join(lines).split('"""', 2)[2].splitlines()
    assert [line for line in code if "utrider" in line] == [OURS]
    assert f"-{THEIRS}\n+{OURS}" in guide
    assert f"[examples/{name}.py](../examples/{name}.py), 1 of {len(lines)} lines" in guide


@pytest.mark.parametrize(("is_estimated", "ticks"), [(True, 6), (False, 5)])
def test_a_pass_of_local_steps_ends_at_the_last_tick_whatever_ranks_had_estimated(
    is_estimated: bool, ticks: int
) -> None:
    """A schedule that is stepped once per epoch, or in shared steps, has no estimate."""
    due = iter([3, 0])
    schedule = PreparedSchedule(SimpleNamespace(step=lambda: None), ticks_due=lambda one: next(due))
    schedule.step()
    count = StepCount(step_samples=8, steps_per_epoch=6)
    accelerator: Any = SimpleNamespace(
        _schedulers=[schedule],
        _told=lambda own, what: [own, [[5, is_estimated]]],
        _count=count,
        session=SimpleNamespace(samples_seen=48),
    )
    Accelerator._follow_schedules(accelerator)
    assert schedule.in_pass == ticks


@pytest.mark.parametrize(
    ("policy", "can_gather"), [("cadence", False), ("async", False), ("sync", True), ("auto", None)]
)
def test_ranks_tick_as_one_device_and_gather_where_they_take_the_same_steps(
    policy: str, can_gather: bool | None, tmp_path: Path
) -> None:
    told = run_ranks("accelerated", folder=tmp_path, devices=UNEQUAL, policy=policy)
    assert told[0]["weights"] == told[1]["weights"]
    assert [rank["ticks"] for rank in told] == [12, 12]
    assert [rank["gathered"] for rank in told] == [[0, 10, 1, 11]] * 2
    assert [rank["reduced"] for rank in told] == [1.0, 1.0]
    assert [rank["padded"] for rank in told] == [[5, -1], [5, 6]]
    # With auto, the policy and the speed of the machine decide.
    assert can_gather is None or ("would wait for ranks that never come" in told[0]["refused"]) != can_gather


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_gradients_are_accumulated_clipped_by_value_and_the_model_is_saved(policy: str, tmp_path: Path) -> None:
    plain = run_ranks("accumulating", folder=tmp_path / "plain", policy=None)[0]
    first, second = run_ranks("accumulating", folder=tmp_path / "ranks", devices=UNEQUAL, policy=policy)
    assert first["weights"] == second["weights"] == first["saved"]
    assert first["missing"] == plain["missing"] == ["lm_head.weight"], "tied to the embedding, as accelerate saves it"
    assert [rank["answers"] for rank in (plain, first, second)] == [[True, False]] * 3
    if policy == "balanced":
        assert first["weights"] == pytest.approx(plain["weights"], abs=1e-5)


def test_what_a_session_cannot_honour_is_refused_by_name(tmp_path: Path) -> None:
    told = run_ranks("accelerator_refusals", folder=tmp_path)[0]
    for name, message in told.items():
        assert name in message, message
