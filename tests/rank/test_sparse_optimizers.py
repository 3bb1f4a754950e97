"""An optimizer of sparse gradients beside averages that are dense."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.policy.policies import policy_spec
from outrider.rank.averages import _refuse_sparse_optimizers


def replica_of(policy: str, optimizer: type[torch.optim.Optimizer]) -> Any:
    model = nn.Embedding(4, 2, sparse=True)
    recipe = SimpleNamespace(policy_spec=policy_spec(policy))
    return SimpleNamespace(recipe=recipe, optimizers=(optimizer(list(model.parameters())),))  # type: ignore[call-arg]


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced"])
def test_sparse_adam_is_refused_where_steps_are_shared(policy: str) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        _refuse_sparse_optimizers(replica_of(policy, torch.optim.SparseAdam))
    assert str(caught.value) == (
        "SparseAdam takes sparse gradients, and in shared steps every rank gets the mean gradient, which is dense\n"
        "hint: use Adam, or a policy whose ranks step with their own gradients: cadence, async"
    )


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("cadence", torch.optim.SparseAdam), ("async", torch.optim.SparseAdam), ("sync", torch.optim.SGD)],
)
def test_other_optimizers_and_policies_are_not(policy: str, optimizer: type[torch.optim.Optimizer]) -> None:
    _refuse_sparse_optimizers(replica_of(policy, optimizer))
