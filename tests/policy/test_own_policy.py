"""A fifth policy, defined in this file: it simulates and trains, in the lab and on real ranks."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import outrider
from outrider.errors import ConfigError
from outrider.policy import POLICY_TABLE, Average, Batch, Policy, PolicySpec, SegmentContext, SharedStep, Step
from outrider.policy.policies import PolicyName
from outrider.policy.policy_spec import EFFECTS
from outrider.replica.averaging_compensation import compensate
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab
from outrider.virtual.simulator import DeviceSpeed, Network, Scenario, simulate

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SAMPLES, BATCH = 96, 8
GUIDE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text().split("\n# Write your own backend\n")[0]


def in_turns(segment: SegmentContext) -> Policy:
    """Rank after rank takes the next batch, and all average when each had one."""
    seat = segment.seat
    batches = list(segment.span.batches(seat.batch_size))
    for first in range(0, len(batches), seat.world_size):
        mine = batches[first + seat.rank : first + seat.rank + 1] if first + seat.rank < len(batches) else []
        for batch in mine:
            yield Step(batch, at=batches[first].start)
        report = yield Average(samples=sum(batch.count for batch in mine))
        if report.ends_segment:
            return


FIFTH = PolicySpec(name="in_turns", open=in_turns, summary="one batch each, then an average", blocks_at_averages=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def squared_error(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(7))
    return inputs, inputs.sum(dim=1, keepdim=True)


def problem() -> dict[str, Any]:
    return {"model": make_model, "optimizer": make_optimizer, "step": squared_error, "dataset": make_data()}


def scenario() -> Scenario:
    return Scenario(
        speeds=(DeviceSpeed(per_sample_ms=0.1), DeviceSpeed(per_sample_ms=0.2)),
        network=Network(),
        num_samples=64 * 100,
        batch_size=64,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> outrider.Trained:
    """On two ranks that are processes of their own."""
    run = outrider.train(
        **problem(),
        batch_size=BATCH,
        epochs=2,
        policy=FIFTH,
        devices="cpu,cpu@0.5",
        threads_per_rank=1,
        checkpoint_every=1,
        run_dir=tmp_path_factory.mktemp("own") / "run",
    )
    return run.join()


def test_it_simulates() -> None:
    outcome = simulate(FIFTH, scenario())
    assert (outcome.policy, outcome.averages, outcome.samples_by_rank) == ("in_turns", 50, (3200, 3200))


def test_it_trains_on_two_ranks(trained: outrider.Trained) -> None:
    first, last = trained.epochs
    assert (first.samples, first.averages) == (NUM_SAMPLES, NUM_SAMPLES // BATCH // 2)
    assert last.loss < first.loss


def test_the_lab_learns_the_same_with_it_as_real_ranks(trained: outrider.Trained) -> None:
    recipe = Recipe(**problem(), batch_size=BATCH, epochs=2, policy=FIFTH)
    state = train_in_lab(recipe, Bench(speeds=(1.0, 0.5))).state_dict()
    assert all(torch.equal(state[name], value) for name, value in trained.state_dict.items())


def test_record_and_configuration_have_its_name(trained: outrider.Trained) -> None:
    record, config = (json.loads((trained.run_dir / name).read_text()) for name in ("record.json", "config.json"))
    assert record["policy"] == record["options"]["policy"] == config["options"]["policy"] == "in_turns"


def test_a_run_resumes_with_it(trained: outrider.Trained, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "devices": "cpu,cpu@0.5", "threads_per_rank": 1}
    run = outrider.train(
        **problem(), **options, epochs=3, policy=FIFTH, resume=trained.run_dir, run_dir=tmp_path / "run"
    )
    assert [epoch.epoch for epoch in run.join().epochs] == [2]


@pytest.mark.parametrize("other", ["cadence", replace(FIFTH, name="renamed")], ids=["ours", "renamed"])
def test_a_resume_with_another_policy_is_refused(trained: outrider.Trained, other: Any) -> None:
    with pytest.raises(ConfigError, match="policy"):
        outrider.train(**problem(), batch_size=BATCH, epochs=3, policy=other, devices="cpu,cpu", resume=trained.run_dir)


def test_a_loop_of_the_users_own_takes_it(tmp_path: Path) -> None:
    inputs, targets = make_data()
    torch.manual_seed(0)
    model = make_model()
    losses = []
    with outrider.Session(policy=FIFTH, devices="cpu", run_dir=tmp_path) as s:
        model, _ = s.prepare(model, make_optimizer(model.parameters()))
        for _ in s.epochs(2):
            for batch in s.batches(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH):
                loss = squared_error(model, batch)
                losses.append(loss.item())
                s.step(loss)
    assert len(losses) == 2 * NUM_SAMPLES // BATCH
    assert sum(losses[-6:]) < sum(losses[:6])


@pytest.mark.parametrize("name", ["sync", "independent"])
def test_the_names_of_the_package_are_taken(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(**problem(), batch_size=BATCH, policy=replace(FIFTH, name=name))
    assert caught.value.message == f"a policy of your own cannot be called {name!r}: that is a policy of outrider"


def test_a_row_of_the_table_is_as_good_as_its_name() -> None:
    assert simulate(POLICY_TABLE["cadence"], scenario()) == simulate("cadence", scenario())


@pytest.mark.parametrize("name", ["", "In Turns", "a/b", None])
def test_a_name_that_makes_no_folder_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"the name of a policy must be lower-case letters, digits and _, got "):
        replace(FIFTH, name=name)


def test_a_policy_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    holder = PolicySpec(name="holder", open=partial(_with, threading.Lock()))
    with pytest.raises(ConfigError, match=r"^policy cannot be sent to the ranks: "):
        outrider.train(**problem(), batch_size=BATCH, policy=holder, devices="cpu,cpu", run_dir=tmp_path / "run")


def _with(_: object, segment: SegmentContext) -> Policy:
    return in_turns(segment)


def test_a_policy_without_compensation_says_so() -> None:
    made = compensate(make_optimizer(make_model().parameters()), policy=FIFTH, outer="auto", lr_scale=1.0)
    assert (made.outer.kind, made.reason) == ("none", "in_turns asks for no compensation")


def test_a_policy_may_ask_for_compensation() -> None:
    bold = replace(FIFTH, outer_momentum="bold")
    made = compensate(make_optimizer(make_model().parameters()), policy=bold, outer="auto", lr_scale=1.0)
    assert (made.outer.kind, made.outer.momentum) == ("nesterov", "bold")


def _yields(effect: Any) -> PolicySpec:
    def policy(segment: SegmentContext) -> Policy:
        yield effect

    return PolicySpec(name="odd", open=policy)


def _steps_on(first: int, stop: int, second: int | None = None) -> Callable[[SegmentContext], Policy]:
    """Rank 0 steps on `first` to `stop`; rank 1 on the same number from `second`, by default the same positions."""

    def policy(segment: SegmentContext) -> Policy:
        start = first if segment.seat.rank == 0 or second is None else second
        yield Step(Batch(start, stop - first), at=0)
        if second is not None and segment.seat.rank == 0:
            yield Step(Batch(6400 - 32, 32), at=0)

    return policy


def _returns(segment: SegmentContext) -> Any:
    return [Step(Batch(0, 1), at=0)]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (_yields("step"), "policy 'odd' yielded 'step', which is not an effect"),
        (_yields(SharedStep(Batch(0, 8), at=0)), "policy 'odd' yielded a SharedStep but does not declare shared steps"),
        (
            _yields(Step(Batch(6400, 8), at=0)),
            "policy 'odd' stepped on positions 6400 to 6408, its segment has 0 to 6400",
        ),
        (
            _yields(Step(Batch(0, 8), at=0)),
            "policy 'odd' does not use each sample once: it stepped on 16 samples of an epoch of 6400",
        ),
        (
            PolicySpec(name="odd", open=_steps_on(0, 3200)),
            "policy 'odd' does not use each sample once: ranks stepped 2 times on position 0",
        ),
        (
            PolicySpec(name="odd", open=_steps_on(0, 3184, 3216)),
            "policy 'odd' does not use each sample once: no rank stepped on position 3184",
        ),
        (PolicySpec(name="odd", open=_returns), "open of policy 'odd' returned list, expected a generator"),
    ],
    ids=["no effect", "shared", "outside", "left out", "twice", "a gap", "no generator"],
)
def test_a_mistake_in_a_policy_is_told(policy: PolicySpec, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(policy, scenario())
    assert caught.value.message == message


PACKAGE = Path(outrider.__file__).parent
NAMED = re.compile(r"""["'](sync|balanced|cadence|async)["']""")
MAY_NAME = {
    "policy/policies/__init__.py": "the table",
    "replica/portable_state.py": "a hint that recommends a policy",
    "timeline/live_verdict.py": "a page of a run knows its policy by the name in the record; in sync shares are fixed",
    "bench/modes.py": "peers and graph-sync are ordered as sync is",
    "bench/overhead.py": "targets of two policies",
    "bench/iteration/iteration_plan.py": "sync is measured against torch DDP by default",
    "bench/iteration/loops.py": "torch's own loops are ordered as sync is",
    "bench/scaling/scaling_measure.py": "FSDP2 is ordered as sync is",
    "bench/scaling/finding.py": "which policies to recommend first",
    "cli/iteration.py": "the default of its --policy",
    "bench/comparison/comparison_runs.py": "solo runs take the policy that costs one device least",
    "api/session.py": "a hint that recommends a policy",
    "virtual/advice.py": "which short runs measure shared steps, and which averages in the background",
    "rank/loop_place.py": "a hint that recommends policies",
    "rank/memory_needs.py": "a way out that recommends a policy",
    "replica/loop_state.py": "a hint that recommends a policy",
    "integrations/accelerate.py": "hints that recommend a policy",
    "integrations/accelerate_arguments.py": "the default of its Accelerator",
    "integrations/hf_arguments.py": "a hint that recommends a policy",
    "integrations/lightning_ranks.py": "the default of its strategies",
    "integrations/lightning_epochs.py": "hints that recommend policies",
    "integrations/lightning_fabric.py": "a hint that recommends policies",
    "integrations/lightning_schedules.py": "a hint that recommends policies",
    "integrations/lightning_trainer.py": "hints that recommend policies",
}
"""Files that name particular policies, and why."""


def test_no_other_file_spells_the_names_of_policies() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if NAMED.search(path.read_text())]
    assert sorted(str(path.relative_to(PACKAGE)) for path in files) == sorted(MAY_NAME)


def test_editors_know_the_names_of_the_table() -> None:
    assert get_args(PolicyName) == tuple(POLICY_TABLE)


def test_every_policy_has_words_for_help_and_docs() -> None:
    assert [name for name, spec in POLICY_TABLE.items() if not (spec.summary and spec.choose_when)] == []


def test_every_field_and_effect_is_in_the_guide() -> None:
    known = [field.name for field in fields(PolicySpec)] + [f"{effect.__name__}(" for effect in EFFECTS]
    assert [name for name in known if f"`{name}" not in GUIDE] == []


def test_the_example_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE):
        exec(block, scope)
    simulated, *_, lab, loss = capsys.readouterr().out.splitlines()
    assert simulated.startswith("local_sgd: ")
    assert float(lab.removeprefix("lab: ")) == pytest.approx(float(loss), rel=1e-4)
    assert os.listdir("runs")[0].endswith("-local_sgd")
