"""Decides the layout of a model in flat tensors, and moves its parameters and float buffers there.

Does not average, and does not know other ranks. Called by whoever trains a model: the rank driver, the lab, the tests.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from outrider.average.layout import ALIGNMENT_BYTES, Place, Planner, is_dense
from outrider.errors import ConfigError


class Kind(IntEnum):
    """What a region holds; regions are laid out in this order, so that each kind is one slice per dtype."""

    PARAMETER = 0
    MEAN = 1
    VARIANCE = 2
    BUFFER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NormPair:
    """Running mean and variance of one BatchNorm-like module, as slices of the flat tensor of `dtype`."""

    dtype: torch.dtype
    mean: slice
    variance: slice


@dataclass(kw_only=True, slots=True)
class Tenant:
    """A parameter or buffer that lives in the arena; `owner` finds a buffer again that was assigned anew."""

    name: str
    tensor: Tensor
    kind: Kind
    owner: nn.Module
    key: str

    def current(self) -> Tensor:
        if self.kind is Kind.PARAMETER:
            return self.tensor
        found = self.owner._buffers.get(self.key)
        return self.tensor if found is None else found


@dataclass(kw_only=True, slots=True)
class Region:
    """A range of the arena and the tensors that share it: more than one where weights are tied."""

    kind: Kind
    tenants: list[Tenant]
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " = ".join(tenant.name for tenant in self.tenants)


class Arena:
    """The parameters and float buffers of a model in one flat tensor per dtype; the model keeps working on views.

    In each flat tensor parameters come first, then running means, running variances and other float buffers.
    Regions start at multiples of 64 bytes; the zeros between them belong to no tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        tenants = list(_tenants(model))
        _refuse_empty(tenants)
        self.device = _only_device(tenants)
        _refuse_unusable(tenants)
        self._integer_tenants = [t for t in _unique(tenants) if not _is_averaged(t.tensor)]
        self._regions = _regions([t for t in tenants if _is_averaged(t.tensor)])
        self.parameter_numel, totals = _place(self._regions)
        self.flats = {dtype: torch.zeros(n, dtype=dtype, device=self.device) for dtype, n in totals.items()}
        self._homes = list(self._move_in())
        self.parameters = [home.tenant.tensor for home in self._homes if isinstance(home.tenant.tensor, nn.Parameter)]
        self.names = [region.name for region in self._regions]
        self.norm_pairs = _norm_pairs(self._regions)
        self.norm_blocks = _norm_blocks(self.norm_pairs)

    @property
    def integers(self) -> list[Tensor]:
        """Integer and bool tensors of the model; they live where they did."""
        return [tenant.current() for tenant in self._integer_tenants]

    @property
    def fingerprint(self) -> int:
        """48 bits that are equal on ranks whose arenas have the same layout."""
        facts = [(region.name, [repr(place) for place in region.places]) for region in self._regions]
        return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:6], "big")

    def reclaim(self) -> None:
        """Take back tensors that were pointed elsewhere since, as `flatten_parameters()` or `x.data = y` do."""
        for home in self._homes:
            tensor = home.tenant.current()
            if tensor.data_ptr() != home.pointer:
                home.move_in(tensor)

    @torch.no_grad()
    def dissolve(self) -> None:
        """Give the tensors memory of their own again, ties kept; the arena is of no use afterwards."""
        self.reclaim()
        for region in self._regions:
            first = region.places[0]
            own = self.flats[first.dtype][first.offset : first.stop].clone()
            for tenant, place in zip(region.tenants, region.places, strict=True):
                tenant.current().data = replace(place, offset=0).view(own)

    @torch.no_grad()
    def _move_in(self) -> Iterator[_Home]:
        for region in self._regions:
            for tenant, place in zip(region.tenants, region.places, strict=True):
                view = place.view(self.flats[place.dtype])
                home = _Home(tenant=tenant, view=view, pointer=view.data_ptr())
                home.move_in(tenant.tensor)
                yield home


@dataclass(frozen=True, kw_only=True, slots=True)
class _Home:
    tenant: Tenant
    view: Tensor
    pointer: int

    def move_in(self, tensor: Tensor) -> None:
        if tensor.shape != self.view.shape or tensor.dtype != self.view.dtype:
            raise ConfigError(
                f"{self.tenant.name} changed from {tuple(self.view.shape)} {self.view.dtype} "
                f"to {tuple(tensor.shape)} {tensor.dtype} during training",
                hint="keep shapes and dtypes of parameters and buffers fixed while a run lasts",
            )
        with torch.no_grad():
            self.view.copy_(tensor)
        tensor.data = self.view


def _tenants(model: nn.Module) -> Iterator[Tenant]:
    """Every parameter and buffer under each of its names, in the order of the layout."""
    modules = list(model.named_modules())
    # cuDNN takes an RNN's weights as one block (weights, then biases) at the start of a storage, or copies them.
    recurrent = [(name, module) for name, module in modules if isinstance(module, nn.RNNBase)]
    plain = [(name, module) for name, module in modules if not isinstance(module, nn.RNNBase)]
    for name, module in recurrent:
        yield from sorted(_parameters(name, module), key=lambda tenant: tenant.key.startswith("bias"))
    for name, module in plain:
        yield from _parameters(name, module)
    yield from sorted(_buffers(modules), key=lambda tenant: tenant.kind)


def _parameters(prefix: str, module: nn.Module) -> Iterator[Tenant]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Tenant(name=_join(prefix, key), tensor=parameter, kind=Kind.PARAMETER, owner=module, key=key)


def _buffers(modules: list[tuple[str, nn.Module]]) -> Iterator[Tenant]:
    for prefix, module in modules:
        special = {"running_mean": Kind.MEAN, "running_var": Kind.VARIANCE} if _has_statistics(module) else {}
        for key, buffer in module._buffers.items():
            if buffer is not None:
                kind = special.get(key, Kind.BUFFER)
                yield Tenant(name=_join(prefix, key), tensor=buffer, kind=kind, owner=module, key=key)


def _has_statistics(module: nn.Module) -> bool:
    mean, variance = module._buffers.get("running_mean"), module._buffers.get("running_var")
    if mean is None or variance is None or is_lazy(mean) or is_lazy(variance):
        return False
    return mean.is_floating_point() and mean.dtype == variance.dtype and mean.shape == variance.shape


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unique(tenants: Iterable[Tenant]) -> list[Tenant]:
    return list({id(tenant.tensor): tenant for tenant in tenants}.values())


def _refuse_empty(tenants: list[Tenant]) -> None:
    if not any(tenant.kind is Kind.PARAMETER for tenant in tenants):
        raise ConfigError("the model has no parameters to train", hint="pass a model with at least one nn.Parameter")


def _refuse_unusable(tenants: list[Tenant]) -> None:
    for tenant in tenants:
        if is_lazy(tenant.tensor):
            raise ConfigError(
                f"{tenant.name} is not initialized yet",
                hint="run one forward pass on a sample batch before training, so that lazy layers know their shapes",
            )
        if tenant.tensor.layout is not torch.strided or tenant.tensor.is_meta:
            raise ConfigError(
                f"{tenant.name} is a {tenant.tensor.layout} tensor on {tenant.tensor.device}, "
                "only dense tensors with data can be trained",
                hint="convert it with to_dense(), or to_empty() and an initialization, before training",
            )


def _only_device(tenants: list[Tenant]) -> torch.device:
    first = tenants[0]
    for tenant in tenants:
        if tenant.tensor.device != first.tensor.device:
            raise ConfigError(
                f"the model is on two devices: {first.name} on {first.tensor.device}, "
                f"{tenant.name} on {tenant.tensor.device}",
                hint="a rank has one device: move the whole model there with model.to(device)",
            )
    return first.tensor.device


def _regions(tenants: list[Tenant]) -> list[Region]:
    """One region per memory range; the first tensor seen in it decides kind and order."""
    regions: dict[object, Region] = {}
    for tenant in tenants:
        region = regions.setdefault(_memory_range(tenant.tensor), Region(kind=tenant.kind, tenants=[]))
        same = next((other for other in region.tenants if other.tensor is tenant.tensor), None)
        if same is None:
            region.tenants.append(tenant)
        else:
            same.name += f" = {tenant.name}"
    _refuse_overlap(list(regions.values()))
    return sorted(regions.values(), key=lambda region: region.kind)


def _memory_range(tensor: Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    storage, start, stop = _extent(tensor)
    gaps = None if is_dense(tensor) else (tuple(tensor.shape), tensor.stride())
    return storage, start, stop, tensor.dtype, gaps


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Storage, first and last byte + 1."""
    length = 1 + sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start, start + length * tensor.element_size()


def _refuse_overlap(regions: list[Region]) -> None:
    filled = [region for region in regions if region.tenants[0].tensor.numel()]
    ordered = sorted(filled, key=lambda region: _extent(region.tenants[0].tensor))
    for left, right in itertools.pairwise(ordered):
        left_storage, _, left_stop = _extent(left.tenants[0].tensor)
        right_storage, right_start, _ = _extent(right.tenants[0].tensor)
        if left_storage == right_storage and right_start < left_stop:
            raise ConfigError(
                f"{left.name} and {right.name} overlap in memory without being the same tensor",
                hint="clone one of them before training, or tie the whole tensor",
            )


def _place(regions: list[Region]) -> tuple[dict[torch.dtype, int], dict[torch.dtype, int]]:
    """Give every tenant its place; returns the length of the parameters and of everything, per dtype."""
    planner = Planner()
    for region in (region for region in regions if region.kind is Kind.PARAMETER):
        _place_region(region, planner)
    planner.align()
    parameters = dict(planner.ends)
    for region in (region for region in regions if region.kind is not Kind.PARAMETER):
        _place_region(region, planner)
    return {dtype: parameters.get(dtype, 0) for dtype in planner.ends}, planner.ends


def _place_region(region: Region, planner: Planner) -> None:
    first, *others = region.tenants
    # An RNN's weights must touch each other to be one block for cuDNN.
    is_recurrent = region.kind is Kind.PARAMETER and isinstance(first.owner, nn.RNNBase)
    place = planner.place(first.tensor, alignment_bytes=1 if is_recurrent else ALIGNMENT_BYTES)
    region.places = [place, *(_alias(place, other.tensor) for other in others)]


def _alias(place: Place, tensor: Tensor) -> Place:
    """The same memory under the other tensor's shape; strides too, so that a tied transpose stays one."""
    if not is_dense(tensor):
        return place
    return Place(
        dtype=place.dtype,
        offset=place.offset,
        numel=place.numel,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        is_complex=place.is_complex,
    )


def _norm_pairs(regions: list[Region]) -> list[NormPair]:
    means = [region for region in regions if region.kind is Kind.MEAN]
    variances = [region for region in regions if region.kind is Kind.VARIANCE]
    pairs = []
    for mean, variance in zip(means, variances, strict=False):
        if mean.tenants[0].owner is not variance.tenants[0].owner:
            break
        a, b = mean.places[0], variance.places[0]
        pairs.append(NormPair(dtype=a.dtype, mean=slice(a.offset, a.stop), variance=slice(b.offset, b.stop)))
    if not len(pairs) == len(means) == len(variances):
        shared = next(region for region in [*means, *variances][len(pairs) :])
        raise ConfigError(
            f"running statistics are shared in part, first at {shared.name}",
            hint="share the whole norm layer, or give each its own running_mean and running_var",
        )
    return pairs


def _norm_blocks(pairs: list[NormPair]) -> list[NormPair]:
    """All pairs of a dtype as one: means and variances have the same shapes in the same order, so they keep step."""
    blocks = []
    for dtype in dict.fromkeys(pair.dtype for pair in pairs):
        own = [pair for pair in pairs if pair.dtype == dtype]
        means = slice(own[0].mean.start, own[-1].mean.stop)
        variances = slice(own[0].variance.start, own[-1].variance.stop)
        blocks.append(NormPair(dtype=dtype, mean=means, variance=variances))
    return blocks
