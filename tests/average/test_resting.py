"""Tensors at rest: what changes is seen, whatever changed it, and the state of an average outlives a new layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outrider.average import resting
from outrider.average.arena import Arena
from outrider.average.arena_layout import ArenaLayout
from outrider.average.exchange import Exchange
from outrider.average.layout_change import carried_over, layout_of_saved
from outrider.average.outer import Outer
from outrider.average.resting import RestingCopy, RestingWatch, content_hash
from outrider.errors import ConfigError, DataError


class Resting(nn.Module):
    """One trained layer; everything else is at rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.teacher = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
        self.packed = nn.Parameter(torch.zeros(8192, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("codes", torch.arange(4096.0))
        self.register_buffer("mask", torch.ones(128, 1, dtype=torch.bool).expand(128, 128))


CHANGES: dict[str, Callable[[Resting], object]] = {
    "codes": lambda model: model.codes.data[17].add_(1.0),
    "teacher.weight": lambda model: model.teacher.weight.data.mul_(0.5),
    "packed": lambda model: model.packed.data.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    model = Resting()
    watch = RestingWatch(Arena(model).layout.resting)
    assert watch.changed(is_thorough=True) == []
    CHANGES[name](model)
    assert watch.changed(is_thorough=False) == [name]


def test_a_buffer_that_was_assigned_anew_is_seen() -> None:
    model = Resting()
    watch = RestingWatch(Arena(model).layout.resting)
    model.codes = model.codes * 1.0
    assert watch.changed(is_thorough=True) == []
    model.codes = model.codes * 2.0
    assert watch.changed(is_thorough=True) == ["codes"]


def test_values_that_change_places_are_seen() -> None:
    model = Resting()
    watch = RestingWatch(Arena(model).layout.resting)
    model.codes.data[[0, 256]] = model.codes.data[[256, 0]]
    assert watch.changed(is_thorough=True) == ["codes"]


def test_a_table_of_another_length_was_computed_anew_and_did_not_change() -> None:
    model = Resting()
    watch = RestingWatch(Arena(model).layout.resting)
    model.codes = torch.arange(8192.0)
    assert watch.changed(is_thorough=True) == []


def test_a_large_buffer_is_read_as_a_whole_between_two_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "FULL_BYTES", 1024)
    monkeypatch.setattr(resting, "NUM_SAMPLED", 16)
    model = Resting()
    watch = RestingWatch(Arena(model).layout.resting)
    model.codes.data[17] += 1.0
    assert watch.changed(is_thorough=False) == []
    assert watch.changed(is_thorough=True) == ["codes"]


def test_a_hash_does_not_depend_on_the_memory_format() -> None:
    values = torch.randn(2, 3, 4, 5)
    assert content_hash(values) == content_hash(values.to(memory_format=torch.channels_last))


def test_trial_steps_are_undone() -> None:
    model = Resting()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = RestingCopy(Arena(model).layout.resting)
    for change in CHANGES.values():
        change(model)
    kept.put_back()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_trial_steps_that_change_what_was_too_large_to_copy_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "COPIED_BYTES", 1024)
    model = Resting()
    kept = RestingCopy(Arena(model).layout.resting)
    kept.put_back()
    model.codes.data.add_(1.0)
    with pytest.raises(ConfigError) as caught:
        kept.put_back()
    assert caught.value.hint == 'pass execution="eager" and a number as micro_batch, so that no steps are tried'


def test_small_tensors_among_large_ones_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codebook that a step changes, beside frozen weights of many gigabytes."""
    monkeypatch.setattr(resting, "COPIED_BYTES", 2**15 + 2**14)
    model = Resting()
    kept = RestingCopy(Arena(model).layout.resting)
    model.codes.data.add_(1.0)
    kept.put_back()
    assert torch.equal(model.codes, torch.arange(4096.0))


# The state of an average in another layout


def make_exchange(model: nn.Module) -> Exchange:
    exchange = Exchange(Arena(model), rank=0, world_size=1, num_facts=0, outer=Outer(kind="nesterov", momentum=0.5))
    for part in exchange.parts:
        part.ref.copy_(torch.arange(part.ref.numel()))
        assert part.velocity is not None
        part.velocity.copy_(-part.ref[part.parameters])
    return exchange


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False))


def test_what_stays_keeps_its_common_point_and_velocity() -> None:
    model = two_layers()
    exchange = make_exchange(model)
    before, state = exchange.arena.layout, exchange.state_dict()
    model[0].requires_grad_(False)
    later = Exchange(
        exchange.arena.relaid(model, changing=(), trained=None),
        rank=0,
        world_size=1,
        num_facts=0,
        outer=Outer(kind="nesterov", momentum=0.5),
    )
    after = later.arena.layout
    later.load_state_dict(carried_over(state, before=before, after=after, fresh=later.state_dict()))
    (part,) = later.parts
    # From 0.weight (256), 1.weight, 1.bias (16 each), 2.weight (256), means and variances (16 each) the first left.
    assert part.ref.tolist() == list(range(256, 256 + 32 + 256 + 32))
    assert part.velocity is not None
    assert part.velocity.tolist() == [-float(n) for n in range(256, 256 + 32 + 256)]


def test_what_is_thawed_begins_where_it_is_and_without_velocity() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    exchange = make_exchange(model)
    before, state = exchange.arena.layout, exchange.state_dict()
    model[0].requires_grad_(True)
    outer = Outer(kind="nesterov", momentum=0.5)
    arena = exchange.arena.relaid(model, changing=(), trained=None)
    later = Exchange(arena, rank=0, world_size=1, num_facts=0, outer=outer)
    later.load_state_dict(carried_over(state, before=before, after=arena.layout, fresh=later.state_dict()))
    (part,) = later.parts
    assert torch.equal(part.ref[:256], model[0].weight.detach().flatten())
    assert part.ref[256:].tolist() == list(range(32 + 256 + 32))
    assert part.velocity is not None
    assert part.velocity[:256].count_nonzero() == 0


def test_older_states_with_frozen_tensors_are_read() -> None:
    model = two_layers()
    whole = ArenaLayout(model, takes_all=True).fingerprint
    model[0].requires_grad_(False)
    now = ArenaLayout(model)
    assert layout_of_saved(now.fingerprint, model, now) is now
    assert layout_of_saved(whole, model, now).names[0] == "0.weight"
    with pytest.raises(DataError, match="the saved average belongs to another model"):
        layout_of_saved(1, model, now)
