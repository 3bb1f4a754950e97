"""Moves the trained parameters and float buffers, which averages use, into one flat tensor per dtype.

The layout decides which tensors these are; the rest of the model stays where it is. Does not average, and does not know
other ranks. Called by the replicas, by the lab and by `wrap()`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.average.arena_layout import ArenaLayout, Kind, Region, Tenant, plain_tensors
from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class NormPair:
    """Running mean and variance of one BatchNorm-like module, as slices of the flat tensor of `dtype`."""

    dtype: torch.dtype
    mean: slice
    variance: slice


class Arena:
    """The trained parameters and float buffers of a model in flat tensors; the model keeps working on views.

    In each flat tensor parameters come first, then running means, running variances and other float buffers.
    Regions start at multiples of 64 bytes; the zeros between them belong to no tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        changing: Collection[str] = (),
        trained: Collection[str] | None = None,
        takes_all: bool = False,
    ) -> None:
        """The arguments are those of ArenaLayout."""
        layout = self.layout = ArenaLayout(model, changing=changing, trained=trained, takes_all=takes_all)
        self.device = layout.device
        self._regions = layout.regions
        self.parameter_numel = layout.parameter_numel
        self.flats = {dtype: torch.zeros(n, dtype=dtype, device=self.device) for dtype, n in layout.totals.items()}
        self._homes = list(self._move_in())
        self.parameters = [parameter for home in self._homes if (parameter := home.parameter) is not None]
        """The parameters in the arena that are expected to get a gradient."""
        inside = {id(parameter) for parameter in self.parameters}
        self.frozen = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        """All other parameters."""
        self.names = layout.names
        self.norm_pairs = _norm_pairs(self._regions)
        self.norm_blocks = _norm_blocks(self.norm_pairs)

    @property
    def integers(self) -> list[Tensor]:
        """Integer and bool tensors that averages treat as counters; they stay outside of the flat tensors."""
        return [tenant.current() for tenant in self.layout.integers]

    @property
    def resting(self) -> list[Tensor]:
        """The tensors that averages leave alone, as plain tensors that own memory."""
        return [plain for tenant in self.layout.resting for plain in plain_tensors(tenant.current())]

    @property
    def fingerprint(self) -> int:
        """A 48-bit hash of the layout, equal on ranks with the same layout."""
        return self.layout.fingerprint

    def reclaim(self) -> None:
        """Move back tensors that were reassigned, for example by `flatten_parameters()` or `x.data = y`."""
        for home in self._homes:
            tensor = home.tenant.current()
            if tensor.data_ptr() != home.pointer:
                home.move_in(tensor)

    def dissolve(self) -> None:
        """Give the tensors their own memory again and keep tied weights tied; the arena cannot be used afterwards."""
        self.reclaim()
        self._release(self._regions)

    def relaid(self, model: nn.Module, *, changing: Collection[str], trained: Collection[str] | None) -> Arena:
        """Create the model's arena after tensors were frozen or thawed; this one cannot be used afterwards."""
        self.reclaim()
        later = Arena(model, changing=changing, trained=trained)
        inside = {id(tenant.tensor) for region in later._regions for tenant in region.tenants}
        # Tensors that left the arena must not keep the old flat tensors alive.
        self._release(region for region in self._regions if id(region.tenants[0].tensor) not in inside)
        return later

    @torch.no_grad()
    def _release(self, regions: Iterable[Region]) -> None:
        for region in regions:
            first = region.places[0]
            own = self.flats[first.dtype][first.offset : first.stop].clone()
            for tenant, place in zip(region.tenants, region.places, strict=True):
                tenant.current().data = replace(place, offset=0).view(own)

    @torch.no_grad()
    def _move_in(self) -> Iterator[_Home]:
        for region in self._regions:
            for tenant, place in zip(region.tenants, region.places, strict=True):
                view = place.view(self.flats[place.dtype])
                home = _Home(
                    tenant=tenant, view=view, pointer=view.data_ptr(), is_expected=self._expects(region, tenant)
                )
                home.move_in(tenant.tensor)
                yield home

    def _expects(self, region: Region, tenant: Tenant) -> bool:
        return self.layout.takes_all or (region.kind is Kind.PARAMETER and tenant.is_trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Home:
    tenant: Tenant
    view: Tensor
    pointer: int
    is_expected: bool
    """Whether a gradient is expected, if the tensor is a parameter."""

    @property
    def parameter(self) -> nn.Parameter | None:
        tensor = self.tenant.tensor
        return tensor if self.is_expected and isinstance(tensor, nn.Parameter) else None

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
    """Merge all pairs of a dtype into one; means and variances have the same shapes in the same order."""
    blocks = []
    for dtype in dict.fromkeys(pair.dtype for pair in pairs):
        own = [pair for pair in pairs if pair.dtype == dtype]
        means = slice(own[0].mean.start, own[-1].mean.stop)
        variances = slice(own[0].variance.start, own[-1].variance.stop)
        blocks.append(NormPair(dtype=dtype, mean=means, variance=variances))
    return blocks
