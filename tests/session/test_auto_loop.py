"""A user's own loop that changes between exact and local steps: every sample once, one model, one optimizer state."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SIZE, BATCH, EPOCHS = 328, 8, 3
"""Whole batches, and shares by which no rank is without samples in a shared step."""

SCRIPT = """
import json, os, sys
from dataclasses import replace
import torch, outrider
from torch import nn
from outrider.policy import PolicyChooser, PolicySpec
from outrider.policy.policies.auto import auto

size, batch_size, epochs, folder, changes = *map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5])
may_rest = sys.argv[6] == "may rest"

class Restless(PolicyChooser):
    count, left = 0, changes

    def learn_exact(self, report, splitter, left):
        return self.counted(report, 3 if may_rest else 9)

    def learn_local(self, report, planner):
        return self.counted(report, 5)

    def counted(self, report, limit):
        self.count += 1
        if self.count < limit or not self.left:
            return []
        self.count, self.left = 0, self.left - 1
        return [self._change(report, is_exact=not self.is_exact, reason="restless")]

choosers = []

def open_auto(segment):
    if not choosers:
        choosers.append(Restless(world_size=2))
    return auto(replace(segment, chooser=choosers[0]))

policy = PolicySpec(name="restless", open=open_auto, shares_steps=True, batch_is_global=True, switches=True)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(size, 6, generator=generator)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(size))
torch.manual_seed(0)
body, head = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()), nn.Linear(16, 2)
options = {} if may_rest else {"shares": (0.5, 0.5)}
with outrider.Session(devices="cpu,cpu@0.5", policy=policy, anchor=2, run_dir=f"{folder}/run", **options) as s:
    optimizers = [torch.optim.Adam(body.parameters(), lr=0.02)]
    optimizers += [torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)]
    s.prepare(body, head, *optimizers)
    used, was_local = [], False
    for epoch in s.epochs(epochs):
        for batch in s.batches(data, batch_size=batch_size):
            used += batch[2].tolist()
            if may_rest and choosers and not choosers[0].is_exact and not was_local:
                # What a loop sets by its own progress differs between ranks that train on their own.
                was_local = True
                optimizers[1].param_groups[0].update(lr=0.1 - 0.01 * s.rank, momentum=0.9 - 0.1 * s.rank)
            for optimizer in optimizers:
                optimizer.zero_grad()
            s.backward(nn.functional.cross_entropy(head(body(batch[0])), batch[1]))
            for optimizer in optimizers:
                optimizer.step()
    tensors = [*body.state_dict().values(), *head.state_dict().values()]
    tensors += [value for o in optimizers for entry in o.state_dict()["state"].values() for value in entry.values()]
    settings = [[group[key] for key in ("lr", "momentum")] for group in optimizers[1].param_groups]
    told = {"used": used, "was_local": was_local, "settings": settings}
    told["tensors"] = [torch.as_tensor(tensor).tolist() for tensor in tensors]
    with open(f"{folder}/rank{s.rank}.json", "w") as file:
        json.dump(told, file)
"""


def run(folder: Path, *, changes: int, may_rest: bool = False) -> list[dict[str, Any]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    numbers = [str(number) for number in (SIZE, BATCH, EPOCHS)]
    told = [str(folder), str(changes), "may rest" if may_rest else "share"]
    subprocess.run([sys.executable, str(script), *numbers, *told], check=True, timeout=240)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def decisions(folder: Path) -> list[str]:
    events = json.loads((folder / "run" / "timeline.json").read_text())["events"]
    return [event["value"] for event in events if event["kind"] == "policy"]


@pytest.mark.parametrize("changes", [2, 1000])
def test_every_sample_is_used_once_per_epoch_and_the_ranks_end_with_one_model(tmp_path: Path, changes: int) -> None:
    ranks = run(tmp_path, changes=changes)
    assert decisions(tmp_path)[:2] == ["local", "exact"]
    assert sum((Counter(rank["used"]) for rank in ranks), Counter()) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    if changes == 2:
        # Shared steps at the end: the optimizers of both ranks are the same too.
        assert ranks[0]["tensors"] == ranks[1]["tensors"]


def test_after_local_steps_rank_0_trains_alone(tmp_path: Path) -> None:
    """The loops have counted batches of their own, so they share no steps again."""
    ranks = run(tmp_path, changes=2, may_rest=True)
    assert decisions(tmp_path)[:2] == ["local", "exact"]
    assert sum((Counter(rank["used"]) for rank in ranks), Counter()) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    assert 0 < len(ranks[1]["used"]) < SIZE < len(ranks[0]["used"])
    assert all(rank["was_local"] for rank in ranks)
    assert ranks[0]["settings"] == ranks[1]["settings"] == [[0.1, 0.9]]
    assert ranks[0]["tensors"] == ranks[1]["tensors"]
