"""Ranks that somebody else started with different options or data: told on every rank before they train."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from ports import free_port

from outrider.errors import ConfigError
from outrider.rank.agreement import MAY_DIFFER, check_equal, options_to_compare
from outrider.record.run_config import RunConfig
from outrider.replica.recipe import Recipe

SCRIPT = """
import os, sys, time, torch, outrider
from torch import nn
rank = int(os.environ["RANK"])

def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def train(samples=64, **options):
    inputs = torch.randn(samples, 4)
    options = {"batch_size": 8, "epochs": 1, **options}
    outrider.train(lambda: nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), squared_error,
                   (inputs, inputs.sum(1, keepdim=True)), **options).join()

def slow_mean(model, batch):
    # Long enough for both ranks to lease batches of one evaluation.
    time.sleep(0.05)
    return model(batch[0]).mean()

def session(samples=64, checks=16, epochs=1, batch_size=8, shuffle=True, **options):
    with outrider.Session(**options) as s:
        model = nn.Linear(4, 1)
        model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.randn(samples, 4)
        for epoch in s.epochs(epochs):
            for (batch,) in s.batches((inputs,), batch_size=batch_size, shuffle=shuffle):
                s.step(model(batch).square().mean())
            s.evaluate_together(slow_mean, (torch.randn(checks, 4),))

def shuffled(seed, **options):
    with outrider.Session(**options) as s:
        model = nn.Linear(4, 1)
        model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(seed)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4))
        for (batch,) in s.batches(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=generator)):
            s.step(model(batch).square().mean())

for number, (name, port, *options) in enumerate(eval(sys.argv[1])):
    os.environ["MASTER_PORT"] = str(port)
    run_dir = f"{sys.argv[2]}/{number}"
    try:
        globals()[name](timeout_s=60, devices="cpu,cpu", run_dir=run_dir, **options[rank])
        print("trained", flush=True)
    except outrider.ConfigError as error:
        print(error.message, flush=True)
"""
CASES = {
    "seed is 0 on rank 0 and 1 on rank 1": ("train", {"seed": 0}, {"seed": 1}),
    "the number of samples is 64 on rank 0 and 48 on rank 1": ("train", {"samples": 64}, {"samples": 48}),
    "policy is 'sync' on rank 0 and 'cadence' on rank 1; batch_size is 8 on rank 0 and 4 on rank 1; "
    "epochs is 1 on rank 0 and 2 on rank 1": (
        "train",
        {"policy": "sync", "epochs": 1, "batch_size": 8},
        {"policy": "cadence", "epochs": 2, "batch_size": 4},
    ),
    "policy is 'sync' on rank 0 and 'balanced' on rank 1": ("session", {"policy": "sync"}, {"policy": "balanced"}),
    "the number of samples is 48 on rank 0 and 64 on rank 1": ("session", {"samples": 48}, {"samples": 64}),
    "epochs is 1 on rank 0 and 2 on rank 1; batch_size is 8 on rank 0 and 4 on rank 1; "
    "shuffle is True on rank 0 and False on rank 1": (
        "session",
        {"epochs": 1, "batch_size": 8, "shuffle": True},
        {"epochs": 2, "batch_size": 4, "shuffle": False},
    ),
    "the seed of the DataLoader's generator is 5 on rank 0 and 7 on rank 1": ("shuffled", {"seed": 5}, {"seed": 7}),
    "the number of samples is 320 on rank 0 and 160 on rank 1": ("session", {"checks": 320}, {"checks": 160}),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What each of two ranks says to every case, and to one in which they agree."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    agreeing = ("train", {"threads_per_rank": 1}, {"threads_per_rank": 2})
    wanted = [*CASES.values(), agreeing]
    cases = [(name, free_port(), *options) for name, *options in wanted]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(script), repr(cases), str(folder)]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("difference", CASES)
def test_every_rank_names_what_differs(told: list[list[str]], difference: str) -> None:
    number = list(CASES).index(difference)
    assert [lines[number] for lines in told] == [f"the ranks disagree: {difference}"] * 2


@pytest.mark.slow
def test_threads_may_differ(told: list[list[str]]) -> None:
    assert [lines[-1] for lines in told] == ["trained"] * 2


# Which options are compared.


def recipe(**options: Any) -> Recipe:
    return Recipe(**{"model": print, "optimizer": print, "step": print, "dataset": None, "batch_size": 1} | options)


def test_every_option_is_compared_that_is_not_named_as_free() -> None:
    names = {field.name for kind in (Recipe, RunConfig) for field in fields(kind)}
    assert set(options_to_compare(recipe(), RunConfig())) == names - MAY_DIFFER
    assert names >= MAY_DIFFER


def test_of_functions_only_their_presence_is_compared() -> None:
    first, second, third = (
        options_to_compare(recipe(scheduler=scheduler), RunConfig()) for scheduler in (print, repr, None)
    )
    check_equal([first, second])
    with pytest.raises(ConfigError) as caught:
        check_equal([first, third, second])
    assert caught.value.message == "the ranks disagree: scheduler is given on ranks 0, 2 and None on rank 1"
    assert caught.value.hint == (
        "start every rank with the same options and the same data, or some samples are used twice and others never"
    )
