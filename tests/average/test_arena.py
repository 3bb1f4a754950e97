"""Every element of a model that can change lives in exactly one element of the arena."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outrider.average.arena import Arena
from outrider.average.exchange import Exchange
from outrider.average.transport.collective import meet_pieces
from outrider.errors import ConfigError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SHAPES = ((), (0,), (1,), (3,), (5, 7), (2, 3, 1), (2, 3, 4, 5))


KINDS = ("parameter", "frozen", "buffer", "tied", "shared", "counter", "child", "norm")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One module, parameter or buffer of a random tree."""

    kind: str
    owner: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_channels_last: bool


TREES = st.lists(
    st.builds(
        Piece,
        kind=st.sampled_from(KINDS),
        owner=st.integers(0, 99),
        dtype=st.sampled_from(DTYPES),
        shape=st.sampled_from(SHAPES),
        is_channels_last=st.booleans(),
    ),
    max_size=8,
)


def build(pieces: list[Piece]) -> nn.Module:
    """Modules in modules, with frozen and tied parameters, buffers, mixed dtypes and odd shapes."""
    torch.manual_seed(0)
    modules = [nn.Module()]
    parameters = [nn.Parameter(torch.randn(3))]
    modules[0].register_parameter("first", parameters[0])
    for number, piece in enumerate(pieces):
        owner, older = modules[piece.owner % len(modules)], parameters[piece.owner % len(parameters)]
        name = f"n{number}"
        tensor = torch.randn(piece.shape, dtype=torch.float64).to(piece.dtype)
        if tensor.dim() == 4 and piece.is_channels_last:
            tensor = tensor.to(memory_format=torch.channels_last)
        match piece.kind:
            case "child":
                modules.append(nn.Module())
                owner.add_module(name, modules[-1])
            case "norm":
                owner.add_module(name, nn.BatchNorm1d(3))
            case "counter":
                owner.register_buffer(name, torch.tensor(number))
            case "buffer":
                owner.register_buffer(name, tensor)
            case "tied":
                owner.register_parameter(name, older)
            case "shared":
                owner.register_buffer(name, older.detach())
            case _:
                parameters.append(nn.Parameter(tensor, requires_grad=piece.kind != "frozen"))
                owner.register_parameter(name, parameters[-1])
    return modules[0]


def float_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: t.detach() for name, t in named if t.is_floating_point() or t.is_complex()}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Of every real element."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    strided = torch.zeros(real.shape, dtype=torch.int64)
    for dimension, stride in enumerate(real.stride()):
        shape = [1] * real.dim()
        shape[dimension] = -1
        strided += torch.arange(real.shape[dimension]).view(shape) * stride
    return [real.data_ptr() + real.element_size() * offset for offset in strided.flatten().tolist()]


@settings(max_examples=60, deadline=None)
@given(pieces=TREES)
def test_every_element_lives_in_exactly_one_place_and_keeps_its_value(pieces: list[Piece]) -> None:
    model, untouched = build(pieces), build(pieces)
    arena = Arena(model)
    inside = {
        flat.data_ptr() + flat.element_size() * offset
        for flat in arena.flats.values()
        for offset in range(flat.numel())
    }
    tenants: dict[int, str] = {}
    for region in arena._regions:
        own = set(addresses(region.tenants[0].tensor.detach()))
        assert len(own) == region.places[0].numel
        assert own <= inside
        assert not own & tenants.keys()
        assert all(set(addresses(tied.tensor.detach())) == own for tied in region.tenants)
        tenants.update(dict.fromkeys(own, region.name))
    expected = float_tensors(untouched)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in float_tensors(model).items())
    outside = set(expected) - {name for names in arena.names for name in names.split(" = ")}
    frozen = {parameter.data_ptr() for parameter in model.parameters() if not parameter.requires_grad}
    assert all(float_tensors(model)[name].data_ptr() in frozen for name in outside)


@settings(max_examples=40, deadline=None)
@given(pieces=TREES, samples=st.tuples(st.integers(0, 1000), st.integers(1, 1000)))
def test_after_an_average_each_element_is_the_weighted_mean(pieces: list[Piece], samples: tuple[int, int]) -> None:
    models = [build(pieces), build(pieces)]
    exchanges = [Exchange(Arena(model), rank=r, world_size=2, num_facts=0) for r, model in enumerate(models)]
    for exchange, own in zip(exchanges, samples, strict=True):
        for flat in exchange.arena.flats.values():
            flat.add_(torch.rand(flat.numel(), dtype=torch.float64).to(flat.dtype))
        exchange.snapshot()
        exchange.open(own, [])
    first, second = [{name: wide(t).clone() for name, t in float_tensors(model).items()} for model in models]
    meet_pieces(exchanges)
    for exchange in exchanges:
        exchange.load()
    weight = samples[0] / sum(samples)
    inside = {name for names in exchanges[0].arena.names for name in names.split(" = ")}
    averaged = {name: t for name, t in float_tensors(models[0]).items() if name in inside and "running_var" not in name}
    for name, value in averaged.items():
        mean = weight * first[name] + (1 - weight) * second[name]
        tolerance = torch.finfo(value.dtype).eps * 4
        torch.testing.assert_close(wide(value), mean, rtol=tolerance, atol=tolerance)
        assert torch.equal(value, float_tensors(models[1])[name])


class Adapted(nn.Module):
    """A frozen bfloat16 layer with packed integers, a table and a mask, and two small trained layers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
        self.packed = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8), requires_grad=False)
        self.down = nn.Linear(64, 2, bias=False)
        self.up = nn.Linear(2, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("table", torch.randn(64, 64))
        self.register_buffer("mask", torch.ones(128, 128, dtype=torch.bool))
        self.register_buffer("zeros", torch.zeros(2048, dtype=torch.int8))


def test_only_what_can_change_is_inside() -> None:
    arena = Arena(Adapted())
    assert arena.names == [
        *("down.weight", "up.weight", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var"),
    ]
    assert set(arena.flats) == {torch.float32}
    assert [tenant.name for tenant in arena.layout.integers] == ["zeros", "norm.num_batches_tracked"]
    resting = [tenant.name for tenant in arena.layout.resting]
    assert resting == ["frozen.weight", "frozen.bias", "table", "packed", "mask"]


def test_what_is_at_rest_stays_where_it_is() -> None:
    model = Adapted()
    before = model.frozen.weight.data_ptr()
    Arena(model)
    assert model.frozen.weight.data_ptr() == before


def test_a_frozen_tensor_tied_to_a_trained_one_is_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach(), requires_grad=False)
    arena = Arena(model)
    assert arena.names == ["0.weight = 1.weight"]
    assert arena.parameters == [model[0].weight]
    assert arena.frozen == [model[1].weight]


def test_what_was_seen_to_change_is_inside_and_gets_no_gradient() -> None:
    arena = Arena(Adapted(), changing=["frozen.weight", "table", "mask"])
    assert {"frozen.weight", "table"} <= set(arena.names)
    assert "mask" in {tenant.name for tenant in arena.layout.integers}
    assert all(parameter.requires_grad for parameter in arena.parameters)
    assert arena.parameter_numel[torch.bfloat16] == 0


def test_frozen_parameters_get_memory_of_their_own_when_they_leave() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    values = model[0].weight.detach().clone()
    arena = Arena(model)
    model[0].requires_grad_(False)
    later = arena.relaid(model, changing=(), trained=None)
    assert later.names == ["1.weight", "1.bias"]
    assert torch.equal(model[0].weight, values)
    assert model[0].weight.untyped_storage().nbytes() == 8 * 8 * 4
    assert later.flats[torch.float32].numel() == 64 + 8 + 8


def test_a_parameter_that_requires_no_gradient_for_the_moment_can_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    arena = Arena(model)
    model[0].requires_grad_(False)
    later = arena.relaid(model, changing=(), trained=["0.weight", "1.weight", "1.bias"])
    assert later.names == ["0.weight", "1.weight", "1.bias"]


def test_a_model_with_all_parameters_frozen_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Arena(nn.Linear(2, 2).requires_grad_(False))
    assert str(caught.value) == (
        "nothing to train: all 2 parameters of the model are frozen\n"
        "hint: call requires_grad_(True) on those that are to be trained"
    )


def test_an_arena_of_everything_has_frozen_parameters_too() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    assert Arena(model, takes_all=True).names == ["weight", "bias"]


def test_training_goes_on_in_the_arena() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arena = Arena(model)
    before = arena.flats[torch.float32].clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    changed = (arena.flats[torch.float32] != before).sum()
    assert changed == 15


def test_parameters_come_first() -> None:
    arena = Arena(nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)))
    assert arena.parameter_numel == {torch.float32: 16 + 16 + 256 + 16}
    assert arena.flats[torch.float32].numel() == 16 + 16 + 256 + 16 + 32


def test_tied_weights_share_a_region() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    arena = Arena(model)
    assert arena.names == ["0.weight = 1.weight", "0.bias", "1.bias"]
    assert len(arena.parameters) == 3
    assert model[1].weight is model[0].weight


def test_two_parameters_on_the_same_memory_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    arena = Arena(model)
    assert arena.names == ["0.weight = 1.weight"]
    with torch.no_grad():
        model[0].weight.normal_()
    assert torch.equal(model[1].weight, model[0].weight.t())


def test_channels_last_strides_are_kept() -> None:
    model = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    Arena(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, before)


def test_an_expanded_buffer_gets_elements_of_its_own() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1).expand(5))
    Arena(model)
    model.scale[0] = 3.0
    assert model.scale.tolist() == [3.0, 1.0, 1.0, 1.0, 1.0]


def test_regions_are_aligned() -> None:
    arena = Arena(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    offsets = {parameter.storage_offset() % 16 for parameter in arena.parameters}
    assert offsets == {0}


def test_recurrent_weights_come_first_and_touch_each_other() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.LSTM(3, 7))
    arena = Arena(model)
    assert arena.names[:4] == ["1.weight_ih_l0", "1.weight_hh_l0", "1.bias_ih_l0", "1.bias_hh_l0"]
    offsets = [parameter.storage_offset() for parameter in arena.parameters[:4]]
    assert offsets == [0, 84, 280, 308]


def test_integers_stay_where_they_are() -> None:
    model = nn.BatchNorm1d(3)
    counter = model.num_batches_tracked
    arena = Arena(model)
    assert [tensor is counter for tensor in arena.integers] == [True]


def test_norm_pairs_point_at_mean_and_variance() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5))
    arena = Arena(model)
    model[1].running_mean.fill_(2.0)
    model[1].running_var.fill_(3.0)
    pair = arena.norm_pairs[1]
    assert arena.flats[pair.dtype][pair.mean].tolist() == [2.0] * 5
    assert arena.flats[pair.dtype][pair.variance].tolist() == [3.0] * 5


def test_a_parameter_pointed_elsewhere_is_taken_back() -> None:
    model = nn.Linear(2, 2)
    arena = Arena(model)
    model.weight.data = torch.full((2, 2), 7.0)
    arena.reclaim()
    assert arena.flats[torch.float32][:4].tolist() == [7.0] * 4
    assert model.weight.data_ptr() == arena.flats[torch.float32].data_ptr()


def test_a_buffer_assigned_anew_is_taken_back() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(3))
    arena = Arena(model)
    model.mean = model.mean + 5.0
    arena.reclaim()
    model.mean += 1.0
    assert arena.flats[torch.float32][-3:].tolist() == [6.0] * 3


def test_a_buffer_that_changed_its_shape_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(3))
    arena = Arena(model)
    model.mean = torch.zeros(4)
    with pytest.raises(ConfigError) as caught:
        arena.reclaim()
    assert caught.value.message == "mean changed from (3,) torch.float32 to (4,) torch.float32 during training"


def test_an_arena_of_an_arena_keeps_all_values() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Arena(model)
    Arena(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fingerprints_differ_between_layouts() -> None:
    plain, turned = nn.Conv2d(3, 4, 5), nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
    assert Arena(plain).fingerprint == Arena(nn.Conv2d(3, 4, 5)).fingerprint
    assert Arena(plain).fingerprint != Arena(turned).fingerprint


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Arena(nn.ReLU())
    assert str(caught.value) == (
        "the model has no parameters to train\nhint: pass a model with at least one nn.Parameter"
    )


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Arena(nn.LazyLinear(3))
    assert str(caught.value) == (
        "weight is not initialized yet\n"
        "hint: run one forward pass on a sample batch before training, so that lazy layers know their shapes"
    )


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError) as caught:
        Arena(model)
    assert str(caught.value) == (
        "the model is on two devices: 0.weight on cpu, 1.weight on meta\n"
        "hint: a rank has one device: move the whole model there with model.to(device)"
    )


def test_tensors_that_overlap_in_part_are_refused() -> None:
    memory = torch.zeros(6)
    model = nn.Module()
    model.register_parameter("low", nn.Parameter(memory[:4]))
    model.register_parameter("high", nn.Parameter(memory[2:]))
    with pytest.raises(ConfigError) as caught:
        Arena(model)
    assert str(caught.value) == (
        "low and high overlap in memory without being the same tensor\n"
        "hint: clone one of them before training, or tie the whole tensor"
    )


def test_norm_layers_that_share_only_a_mean_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    with pytest.raises(ConfigError, match="running statistics are shared in part"):
        Arena(model)
