"""A backend of a user's own, defined in this file: ranks average and train with it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import outrider
from outrider.average.transport import BACKEND_TABLE, BackendSpec, BlockingCollective, CollectiveContext, RankCollective
from outrider.average.transport.backend_table import BackendName, choose_backend
from outrider.errors import ConfigError, DeviceError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.record import run_config as configs
from outrider.record.run_config import RunConfig
from outrider.replica import recipe as recipes

GUIDE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text().split("\n# Write your own backend\n")[1]
pytestmark = pytest.mark.usefixtures("one_thread")


class Postcards(BlockingCollective):
    """Every number goes through the store as text: slow, and plain enough to read."""

    def __init__(self, context: CollectiveContext) -> None:
        super().__init__(transport="postcards", rank=context.rank, world_size=context.world_size)
        self._exchange: Callable[[Any], list[Any]] = partial(context.exchange_json, name="postcards")

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._combine(tensors, lambda all_ranks: torch.stack(all_ranks).sum(0))

    def max_(self, tensors: Sequence[Tensor]) -> None:
        self._combine(tensors, lambda all_ranks: torch.stack(all_ranks).amax(0))

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._combine(tensors, lambda all_ranks: all_ranks[source])

    def _combine(self, tensors: Sequence[Tensor], combine: Callable[[list[Tensor]], Tensor]) -> None:
        for tensor in tensors:
            sent = self._exchange(tensor.tolist())
            tensor.copy_(combine([torch.tensor(values, dtype=tensor.dtype) for values in sent]))


POSTCARDS = BackendSpec(name="postcards", open=Postcards, summary="through the store, as text")


def make_model() -> nn.Module:
    return nn.Linear(4, 1)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def squared_error(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def problem() -> dict[str, Any]:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
    data = (inputs, inputs.sum(dim=1, keepdim=True))
    return {"model": make_model, "optimizer": make_optimizer, "step": squared_error, "dataset": data, "batch_size": 8}


def train(run_dir: Path, **options: Any) -> outrider.Trained:
    shared = {"devices": "cpu,cpu", "threads_per_rank": 1, "anchor": 2, "shares": [1, 1], "epochs": 2}
    return outrider.train(**problem(), **shared, run_dir=run_dir, **options).join()


@pytest.mark.parametrize("policy", ["sync", pytest.param("cadence", marks=pytest.mark.slow)])
def test_ranks_learn_the_same_over_it_as_in_shared_memory(tmp_path: Path, policy: str) -> None:
    own = train(tmp_path / "own", policy=policy, backend=POSTCARDS)
    ours = train(tmp_path / "ours", policy=policy, backend="cpu")
    assert all(torch.equal(own.state_dict[name], ours.state_dict[name]) for name in ours.state_dict)
    record, timeline = (json.loads((tmp_path / "own" / f"{name}.json").read_text()) for name in ("record", "timeline"))
    assert (record["backend"], record["options"]["backend"]) == ("postcards", "postcards")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert set(config["objects"]) == recipes.OBJECTS | configs.OBJECTS
    assert [event["value"] for event in timeline["events"] if event["kind"] == "transport"] == ["postcards"]


@dataclass
class Ranks:
    """Threads that stand for ranks: each tells a value, and hears those of all."""

    size: int

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size)
        self._values: list[Any] = [None] * self.size

    def exchange_json(self, value: Any, *, name: str, rank: int) -> list[Any]:
        self._values[rank] = json.loads(json.dumps(value))
        self._barrier.wait(10)
        heard = list(self._values)
        self._barrier.wait(10)
        return heard

    def context(self, rank: int) -> CollectiveContext:
        return CollectiveContext(
            rank=rank,
            world_size=self.size,
            hosts=("here",) * self.size,
            what="numbers",
            timeout_s=10.0,
            exchange_json=partial(self.exchange_json, rank=rank),
            new_group=lambda backend: pytest.fail("no group was needed"),
            peers=(),
            private_folder=None,
            at_end=lambda function: None,
        )


def on_all(size: int, work: Callable[[RankCollective], Any]) -> list[Any]:
    ranks, results = Ranks(size), [None] * size

    def run(rank: int) -> None:
        results[rank] = work(POSTCARDS.open(ranks.context(rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_three_methods_make_a_collective() -> None:
    def work(collective: RankCollective) -> tuple[list[float], list[list[int]]]:
        tensor = torch.tensor([1.0, 2.0]) * (collective.rank + 1)
        collective.wait([collective.start_sum_(tensor)])
        collective.check_peers()
        collective.finish(1.0)
        return tensor.tolist(), collective.gather([collective.rank, 7])

    assert on_all(3, work) == [([6.0, 12.0], [[0, 7], [1, 7], [2, 7]])] * 3


def test_it_is_chosen_where_it_is_asked_for() -> None:
    choice = choose_backend(POSTCARDS, parse_devices("cpu,cpu"))
    assert (choice.backend, choice.reason, choice.spec) == ("postcards", "asked for", POSTCARDS)


def not_on_cpus(specs: Sequence[DeviceSpec]) -> str | None:
    return "postcards get lost" if any(spec.kind == "cpu" for spec in specs) else None


def test_it_may_refuse_devices() -> None:
    with pytest.raises(DeviceError) as caught:
        outrider.train(**problem(), devices="cpu,cpu", backend=replace(POSTCARDS, obstacle=not_on_cpus))
    assert caught.value.message == "backend postcards cannot be used: postcards get lost"


@pytest.mark.parametrize("name", ["cpu", "nccl"])
def test_the_names_of_the_package_are_taken(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(backend=replace(POSTCARDS, name=name))
    assert caught.value.message == f"a backend of your own cannot be called {name!r}: that is a backend of outrider"


@pytest.mark.parametrize("name", ["auto", "", "My Own", None])
def test_a_name_must_be_plain(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the name of a backend must be lower-case letters, digits and _, and not"):
        replace(POSTCARDS, name=name)


def test_a_backend_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    holder = replace(POSTCARDS, open=partial(_with, threading.Lock()))
    with pytest.raises(ConfigError, match=r"^backend cannot be sent to the ranks: "):
        outrider.train(**problem(), devices="cpu,cpu", backend=holder, run_dir=tmp_path / "run")


def _with(_: object, context: CollectiveContext) -> Postcards:
    return Postcards(context)


def test_editors_know_the_names_of_the_table() -> None:
    assert get_args(BackendName) == ("auto", *BACKEND_TABLE)


def test_every_backend_has_words_for_help_and_docs() -> None:
    assert [name for name, spec in BACKEND_TABLE.items() if not (spec.summary and spec.choose_when)] == []


def test_every_field_is_in_the_guide() -> None:
    assert [field.name for field in fields(BackendSpec) if f"`{field.name}`" not in GUIDE] == []


def test_the_example_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)[0], {})
    assert capsys.readouterr().out == "1 averages\n"
