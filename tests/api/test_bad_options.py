"""Options that cannot work: the values, the expectation and the way out, word for word, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import outrider

Trainer = Callable[..., outrider.Run]
Problem = dict[str, Any]


def words_of(start: Callable[[], outrider.Run]) -> str:
    """What train() says."""
    with pytest.raises(outrider.ConfigError) as caught:
        start()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"polciy": "async"}, "unknown option 'polciy'\nhint: did you mean 'policy'?"),
        ({"device": "cpu"}, "unknown option 'device'\nhint: did you mean 'devices'?"),
        ({"lr": 0.1}, "unknown option 'lr'\nhint: see the options of outrider.train"),
        ({"policy": "asynch"}, "unknown policy 'asynch'\nhint: did you mean 'async'?"),
        (
            {"policy": "fast"},
            "unknown policy 'fast'\nhint: choose one of auto, sync, balanced, cadence, async, independent",
        ),
        ({"backend": "ncl"}, "unknown backend 'ncl'\nhint: did you mean 'nccl'?"),
        ({"precision": "bf61"}, "unknown precision 'bf61'\nhint: did you mean 'bf16'?"),
        ({"wire": "int4"}, "unknown wire 'int4'\nhint: did you mean 'int8'?"),
        (
            {"wire": "bf16", "policy": "balanced"},
            "wire='bf16' was given, but policy 'balanced' averages gradients at every step, and promises exact ones\n"
            "hint: leave wire out, or pass a policy that averages parameters, such as 'cadence'",
        ),
        (
            {"wire": "int8", "policy": "independent"},
            "wire='int8' was given, but policy 'independent' sends nothing\n"
            "hint: leave wire out, or pass a policy that averages parameters, such as 'cadence'",
        ),
        ({"outer": "nestorov"}, "unknown outer 'nestorov'\nhint: did you mean 'nesterov'?"),
        ({"resident": "yes"}, "unknown resident 'yes'\nhint: choose one of True, False, \"auto\""),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'\nhint: pass shuffle=True or shuffle=False"),
        ({"verify": 1}, "verify must be True or False, got 1\nhint: pass verify=True or verify=False"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0\nhint: pass batch_size=1 or more"),
        ({"batch_size": 8.5}, "batch_size must be a whole number >= 1, got 8.5\nhint: pass batch_size=1 or more"),
        ({"epochs": -1}, "epochs must be a whole number >= 1, got -1\nhint: pass epochs=1 or more"),
        ({"workers": -1}, "workers must be a whole number >= 0, got -1\nhint: pass workers=0 or more"),
        (
            {"threads_per_rank": 0},
            "threads_per_rank must be a whole number >= 1, got 0\nhint: pass threads_per_rank=1 or more",
        ),
        ({"lr_scale": 0}, "lr_scale must be a number > 0, got 0\nhint: leave lr_scale out for its default"),
        (
            {"max_grad_norm": "5"},
            "max_grad_norm must be a number > 0, got '5'\nhint: leave max_grad_norm out for its default",
        ),
        (
            {"accumulate": 9},
            "accumulate must be <= batch_size, got accumulate=9, batch_size=8\n"
            "hint: a batch is computed in `accumulate` pieces of at least one sample",
        ),
        (
            {"checkpoint_every": 1.5},
            "checkpoint_every must be a whole number of epochs or a part of one, got 1.5\n"
            "hint: pass checkpoint_every=2 for every second epoch, or 0.5 for twice per epoch",
        ),
        ({"port": 70_000}, "port must be 0 to 65535, got 70000\nhint: leave port out and a free one is taken"),
        ({"anchor": 0}, "anchor must be >= 1, got 0\nhint: give a whole number from 1 on"),
        (
            {"max_anchor": 2, "min_anchor": 3},
            "max_anchor must be >= min_anchor, got max_anchor=2, min_anchor=3\n"
            "hint: raise max_anchor or leave min_anchor out",
        ),
        (
            {"overhead_target": 2},
            "overhead_target must be between 0 and 1, got 2\nhint: 0.10 lets averaging take a tenth of the time",
        ),
        (
            {"drift_threshold": -1},
            "drift_threshold must be > 0, got -1\nhint: leave it out for an automatic threshold, or pass guard=False",
        ),
        ({"max_batch_diff": -1}, "max_batch_diff must be >= 0, got -1\nhint: give a whole number from 0 on"),
        (
            {"max_overshoot": -1},
            "max_overshoot must be a whole number >= 0, got -1\nhint: pass max_overshoot=0 or more",
        ),
        (
            {"shares": [1.0]},
            "shares must have one entry per rank, got 1 for world_size=2\nhint: give 2 numbers or leave shares out",
        ),
        (
            {"speed_hints": [1.0, 0.0]},
            "speed_hints must be positive numbers, got 1, 0\nhint: leave a device out of devices to give it nothing",
        ),
        ({"step": 3}, "step must be a function, got int\nhint: pass step=a_function, not its result"),
        ({"epoch_end": 3}, "epoch_end must be a function, got int\nhint: pass epoch_end=a_function, not its result"),
        (
            {"step": lambda batch: batch},
            "step is called as step(model, batch), but <lambda>(batch) does not take that\n"
            "hint: pass a function of (model, batch)",
        ),
        (
            {"epoch_end": lambda epoch, metrics: None},
            "epoch_end is called as epoch_end(context), but <lambda>(epoch, metrics) does not take that\n"
            "hint: pass a function of (context)",
        ),
        (
            {"scheduler": lambda: None},
            "scheduler is called as scheduler(optimizer), but <lambda>() does not take that\n"
            "hint: pass a function of (optimizer)",
        ),
        (
            {"model": nn.Linear},
            "model is called as model(), but Linear(in_features: int, out_features: int, bias: bool = True, "
            "device=None, dtype=None) does not take that\nhint: pass a function without arguments",
        ),
        (
            {"evaluate": print},
            "evaluate was given without eval_dataset\nhint: pass eval_dataset=test_set",
        ),
        ({"eval_dataset": [1]}, "eval_dataset was given without evaluate\nhint: pass evaluate=accuracy"),
        (
            {"evaluate": print, "eval_dataset": []},
            "eval_dataset is empty\nhint: check its path, split or filter, or leave evaluate out",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_cannot_work(train_two: Trainer, tmp_path: Path, options: Problem, words: str) -> None:
    assert words_of(lambda: train_two(run_dir=tmp_path / "run", **options)) == words
    assert not (tmp_path / "run").exists()


def test_an_option_error_is_a_value_error(train_two: Trainer) -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        train_two(policy="asynch")


def test_the_batch_size_must_be_given(problem: Problem) -> None:
    assert words_of(lambda: outrider.train(**problem)) == "batch_size is missing\nhint: pass batch_size=64"


def test_the_builder_knows_the_nearest_name(problem: Problem) -> None:
    builder = outrider.Ddp.builder(problem["model"], problem["optimizer"], problem["step"])
    with pytest.raises(outrider.ConfigError) as caught:
        builder.polcy("async")
    assert str(caught.value) == "unknown option 'polcy'\nhint: did you mean .policy(...)?"


def test_the_builder_needs_a_data_set(problem: Problem) -> None:
    builder = outrider.Ddp.builder(problem["model"], problem["optimizer"], problem["step"]).batch_size(8)
    assert words_of(builder.run) == "dataset is missing\nhint: call .dataset(train_set) before .run()"
