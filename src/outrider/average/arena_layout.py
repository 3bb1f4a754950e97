"""Decides which tensors of a model take part in averages, and their places in flat tensors.

Tensors that can change take part: trained parameters, running statistics, small buffers, and tensors that were seen to
change. All others are at rest: frozen weights, tables, masks, packed integers. Copies nothing. Called by Arena, and on
resume.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider.average.tensor_layout import ALIGNMENT_BYTES, LayoutPlanner, TensorPlace, is_dense
from outrider.errors import ConfigError

SMALL_BYTES = 4096
"""Buffers up to this size (counters, scales, flags) always take part: watching them costs more than sending them."""


class Kind(IntEnum):
    """The kind of a region. Regions are laid out in this order, so that each kind occupies one slice per dtype."""

    PARAMETER = 0
    MEAN = 1
    VARIANCE = 2
    BUFFER = 3


@dataclass(kw_only=True, slots=True)
class Tenant:
    """A parameter or buffer; `owner` is used to find a buffer again after it was assigned anew."""

    name: str
    tensor: Tensor
    kind: Kind
    owner: nn.Module
    key: str
    is_trained: bool = False

    def current(self) -> Tensor:
        if self.kind is Kind.PARAMETER:
            return self.tensor
        found = self.owner._buffers.get(self.key)
        return self.tensor if found is None else found


@dataclass(kw_only=True, slots=True)
class Region:
    """A range of memory and the tensors that share it; tied weights share one region."""

    kind: Kind
    tenants: list[Tenant]
    places: list[TensorPlace] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " = ".join(tenant.name for tenant in self.tenants)


class ArenaLayout:
    """The tensors of a model that take part, with their places, and the tensors at rest.

    `changing` names tensors that take part because their values were seen to change. `trained` names the trained
    parameters; by default these are the parameters that require gradients. With `takes_all` every tensor takes part.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        changing: Collection[str] = (),
        trained: Collection[str] | None = None,
        takes_all: bool = False,
    ) -> None:
        wanted = None if trained is None else {name for names in trained for name in names.split(" = ")}
        tenants = list(_tenants(model, wanted))
        _refuse_empty(tenants, takes_all=takes_all)
        self.device = _only_device(tenants)
        _refuse_unusable(tenants)
        self.changing = frozenset(changing)
        self.takes_all = takes_all
        regions = _regions([tenant for tenant in tenants if _is_averaged(tenant.tensor)])
        integers = _unique(tenant for tenant in tenants if not _is_averaged(tenant.tensor))
        members = {id(region): self._kind_inside(region) for region in regions}
        self.regions: list[Region] = []
        for region in regions:
            kind = members[id(region)]
            if kind is not None:
                region.kind = kind
                self.regions.append(region)
        self.regions.sort(key=lambda region: region.kind)
        self.integers = [tenant for tenant in integers if self._counts(tenant)]
        self.resting = [region.tenants[0] for region in regions if members[id(region)] is None]
        self.resting += [tenant for tenant in integers if not self._counts(tenant)]
        """One tenant for each memory range that takes no part."""
        self.parameter_numel, self.totals = _place(self.regions)

    def _kind_inside(self, region: Region) -> Kind | None:
        """The kind of a region that takes part; None for a region at rest."""
        if self.takes_all:
            return region.kind
        if any(tenant.is_trained for tenant in region.tenants):
            return Kind.PARAMETER
        if any(tenant.name in self.changing for tenant in region.tenants):
            return Kind.BUFFER if region.kind is Kind.PARAMETER else region.kind
        # A frozen parameter may change without a gradient, as a teacher model does; then `changing` contains it.
        if region.kind is Kind.PARAMETER:
            return None
        is_small = region.tenants[0].tensor.nbytes <= SMALL_BYTES
        return region.kind if is_small or region.kind is not Kind.BUFFER else None

    def _counts(self, tenant: Tenant) -> bool:
        """Whether an integer tensor takes part as a counter."""
        if self.takes_all or tenant.name in self.changing:
            return True
        return tenant.kind is not Kind.PARAMETER and tenant.tensor.nbytes <= SMALL_BYTES

    @property
    def trained(self) -> list[str]:
        """The names of trained parameters; a tied one has several."""
        return [tenant.name for region in self.regions for tenant in region.tenants if tenant.is_trained]

    @property
    def names(self) -> list[str]:
        return [region.name for region in self.regions]

    @property
    def fingerprint(self) -> int:
        """A 48-bit hash of all places, equal on ranks with the same layout."""
        return hash_of([(region.name, [repr(place) for place in region.places]) for region in self.regions])

    @property
    def agreement(self) -> int:
        """A 48-bit hash of everything that ranks must have in common, counters included."""
        return hash_of([self.fingerprint, [(one.name, tuple(one.tensor.shape)) for one in self.integers]])


def hash_of(facts: object) -> int:
    """A 48-bit hash."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:6], "big")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor itself, or the tensors inside a subclass without own memory, such as quantized weights."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor is a subclass that keeps its values in inner tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _tenants(model: nn.Module, trained: Collection[str] | None) -> Iterator[Tenant]:
    """Yield every parameter and buffer under each of its names, in the order of the layout."""
    modules = list(model.named_modules())
    # cuDNN takes an RNN's weights as one block (weights, then biases) at the start of a storage, or copies them.
    recurrent = [(name, module) for name, module in modules if isinstance(module, nn.RNNBase)]
    plain = [(name, module) for name, module in modules if not isinstance(module, nn.RNNBase)]
    for name, module in recurrent:
        yield from sorted(_parameters(name, module, trained), key=lambda tenant: tenant.key.startswith("bias"))
    for name, module in plain:
        yield from _parameters(name, module, trained)
    yield from sorted(_buffers(modules), key=lambda tenant: tenant.kind)


def _parameters(prefix: str, module: nn.Module, trained: Collection[str] | None) -> Iterator[Tenant]:
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        name = _join(prefix, key)
        yield Tenant(
            name=name,
            tensor=parameter,
            kind=Kind.PARAMETER,
            owner=module,
            key=key,
            is_trained=parameter.requires_grad if trained is None else name in trained,
        )


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


def _refuse_empty(tenants: list[Tenant], *, takes_all: bool) -> None:
    parameters = {id(tenant.tensor): tenant for tenant in tenants if tenant.kind is Kind.PARAMETER}
    if not parameters:
        raise ConfigError("the model has no parameters to train", hint="pass a model with at least one nn.Parameter")
    if not takes_all and not any(tenant.is_trained or is_lazy(tenant.tensor) for tenant in parameters.values()):
        raise ConfigError(
            f"nothing to train: all {len(parameters)} parameters of the model are frozen",
            hint="call requires_grad_(True) on those that are to be trained",
        )


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
    return list(regions.values())


def _has_memory(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and not is_wrapper(tensor)


def _memory_range(tensor: Tensor) -> object:
    if not _has_memory(tensor):
        return id(tensor)
    storage, start, stop = _extent(tensor)
    gaps = None if is_dense(tensor) else (tuple(tensor.shape), tensor.stride())
    return storage, start, stop, tensor.dtype, gaps


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Storage, first byte, and last byte + 1."""
    length = 1 + sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start, start + length * tensor.element_size()


def _refuse_overlap(regions: list[Region]) -> None:
    filled = [region for region in regions if _has_memory(region.tenants[0].tensor)]
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
    """Assign a place to every tensor; returns per dtype the length of the parameters and the total length."""
    planner = LayoutPlanner()
    for region in (region for region in regions if region.kind is Kind.PARAMETER):
        _place_region(region, planner)
    planner.align()
    parameters = dict(planner.ends)
    for region in (region for region in regions if region.kind is not Kind.PARAMETER):
        _place_region(region, planner)
    return {dtype: parameters.get(dtype, 0) for dtype in planner.ends}, planner.ends


def _place_region(region: Region, planner: LayoutPlanner) -> None:
    first, *others = region.tenants
    # cuDNN needs an RNN's weights as one block, without gaps.
    is_recurrent = region.kind is Kind.PARAMETER and isinstance(first.owner, nn.RNNBase)
    place = planner.place(first.tensor, alignment_bytes=1 if is_recurrent else ALIGNMENT_BYTES)
    region.places = [place, *(_alias(place, other.tensor) for other in others)]


def _alias(place: TensorPlace, tensor: Tensor) -> TensorPlace:
    """A place for the same memory with the other tensor's shape and strides; a tied transpose stays a transpose."""
    if not is_dense(tensor):
        return place
    return TensorPlace(
        dtype=place.dtype,
        offset=place.offset,
        numel=place.numel,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        is_complex=place.is_complex,
    )
