"""Values that a framework broadcasts come back as they were, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError
from outrider.integrations.plain_values import as_told, from_told


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, "text", Path("a/b"), [1, (2, "x")], {"a": [Path("c")], 4: None}, {"tensor": 1, "dtype": "x"}],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = from_told(json.loads(json.dumps(as_told(value))))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.bfloat16])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1], [3, 2]]).to(dtype)
    again = from_told(json.loads(json.dumps(as_told({"x": value}))))["x"]
    assert again.dtype == dtype
    assert torch.equal(again, value)


def test_other_objects_are_refused_on_every_rank() -> None:
    with pytest.raises(ConfigError, match="cannot send a function"):
        from_told(json.loads(json.dumps(as_told([lambda: None]))))
