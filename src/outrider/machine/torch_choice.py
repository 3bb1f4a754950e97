"""Decides which torch build, or which few, runs on a given set of cards, and explains why the others do not.

Knows the wheel table and the driver rules; installs nothing (see setup) and measures nothing. The order is fixed: one
wheel, the conda-forge build, one environment per group of cards, a source build; else no way, with the ways out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.errors import ConfigError
from outrider.machine.drivers import TRAIN_ON_CPU, driver_refusal
from outrider.machine.machine_facts import Facts, Gpu
from outrider.machine.wheels import Wheel, WheelTable, capability_of, release_of, serving_arch, sm, version_of

Way = Literal["cpu", "wheel", "conda", "groups", "build", "none"]
WAYS: tuple[Way, ...] = ("cpu", "wheel", "conda", "groups", "build")
"""Those that a user may ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEnvironment:
    """One torch to install, and the cards it is for."""

    torch: str | None
    """`2.13`; None takes the newest of the backend."""
    backend: str
    cards: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    """Capabilities to build for, of a source build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchChoice:
    """The builds to install, the reasons, and rejected alternatives; `ways_out` if nothing works."""

    way: Way
    environments: tuple[TorchEnvironment, ...] = ()
    reasons: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    ways_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    facts: Facts
    cards: tuple[Gpu, ...]
    table: WheelTable
    torch: str | None

    @property
    def versions(self) -> tuple[str, ...]:
        return (self.torch,) if self.torch else self.table.versions()

    @property
    def driver(self) -> str | None:
        driver = self.facts.driver("nvidia")
        return driver.version if driver else None


def resolve(
    facts: Facts,
    *,
    table: WheelTable,
    torch: str | None = None,
    way: Way | None = None,
    cards: Sequence[int] | None = None,
) -> TorchChoice:
    """The build for these cards; `torch`, `way` and `cards` narrow the choice."""
    chosen = _chosen_cards(facts, cards)
    nvidia = tuple(gpu for gpu in chosen if gpu.vendor == "nvidia")
    amd = tuple(gpu for gpu in chosen if gpu.vendor == "amd")
    if way == "cpu" or not (nvidia or amd):
        return _cpu(facts, torch, has_cards=bool(nvidia or amd))
    question = _Question(facts=facts, cards=nvidia, table=table, torch=release_of(torch) if torch else None)
    if not amd:
        return _resolve_nvidia(question, way)
    if not nvidia:
        return _resolve_amd(question, amd)
    return _both(_resolve_nvidia(question, way), _resolve_amd(question, amd))


def _chosen_cards(facts: Facts, wanted: Sequence[int] | None) -> tuple[Gpu, ...]:
    if wanted is None:
        return tuple(gpu for gpu in facts.gpus if gpu.vendor in ("nvidia", "amd"))
    known = {gpu.index: gpu for gpu in facts.gpus}
    for index in wanted:
        if index not in known:
            listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in facts.gpus) or "no card"
            raise ConfigError(f"card {index} is not there", hint=f"found {listed}")
    return tuple(known[index] for index in wanted)


def _cpu(facts: Facts, torch: str | None, *, has_cards: bool) -> TorchChoice:
    reason = "the CPU build was asked for" if has_cards else "no card was found, so the CPU build is enough"
    return TorchChoice(
        way="cpu",
        environments=(TorchEnvironment(torch=release_of(torch) if torch else None, backend="cpu"),),
        reasons=(reason,),
    )


def _resolve_amd(question: _Question, cards: tuple[Gpu, ...]) -> TorchChoice:
    rocm = question.table.rocm
    missing = [gpu for gpu in cards if not gpu.capability or gpu.capability not in rocm.archs]
    if missing:
        return TorchChoice(
            way="none",
            reasons=tuple(f"{rocm.backend} has no code for {describe(gpu)}" for gpu in missing),
            ways_out=("build torch for the card with PYTORCH_ROCM_ARCH set to its name", TRAIN_ON_CPU),
        )
    names = tuple(gpu.name for gpu in cards)
    reason = f"{rocm.backend} has code for {_join(cards)}; AMD and other ranks meet over the cpu backend"
    return TorchChoice(
        way="wheel", environments=(TorchEnvironment(torch=None, backend=rocm.backend, cards=names),), reasons=(reason,)
    )


def _both(nvidia: TorchChoice, amd: TorchChoice) -> TorchChoice:
    if "none" in (nvidia.way, amd.way):
        failed = nvidia if nvidia.way == "none" else amd
        return failed
    return TorchChoice(
        way="groups",
        environments=nvidia.environments + amd.environments,
        reasons=("no build serves NVIDIA and AMD cards at once", *nvidia.reasons, *amd.reasons),
        rejected=nvidia.rejected,
    )


def _resolve_nvidia(question: _Question, way: Way | None) -> TorchChoice:
    refusal = _refusal(question)
    if refusal:
        return refusal
    tries: dict[Way, Callable[[_Question], TorchChoice | None]] = {
        "wheel": _one_wheel,
        "conda": _conda,
        "groups": _groups,
        "build": _build,
    }
    for name, attempt in tries.items():
        found = attempt(question) if way in (None, name) else None
        if found:
            return found
    return _nothing(question, way)


def _refusal(question: _Question) -> TorchChoice | None:
    facts, table = question.facts, question.table
    unknown = [gpu for gpu in question.cards if not gpu.capability]
    if unknown:
        return TorchChoice(
            way="none",
            reasons=tuple(f"the compute capability of {gpu.name} is not known" for gpu in unknown),
            ways_out=(
                "run `outrider diagnose` to see why NVML cannot be read",
                "name the build: outrider torch install cu130",
            ),
        )
    refused = driver_refusal(facts, question.cards, table)
    if refused:
        return TorchChoice(way="none", reasons=(refused.what, *refused.reasons), ways_out=refused.ways_out)
    if facts.host.platform != table.platform:
        return TorchChoice(
            way="none",
            reasons=(f"the wheel table speaks for {table.platform}, this is {facts.host.platform}",),
            ways_out=("name the build: outrider torch install cu130", "then see what it holds: outrider torch refresh"),
        )
    return None


def _one_wheel(question: _Question) -> TorchChoice | None:
    for version in question.versions:
        for wheel in question.table.of_version(version):
            if not _objection(question, wheel, question.cards):
                return _with_wheel(question, wheel)
    return None


def _with_wheel(question: _Question, wheel: Wheel) -> TorchChoice:
    reasons = [f"torch {wheel.torch} {wheel.backend} has code for {_join(question.cards)}"]
    if wheel.torch != question.versions[0]:
        reasons.append(f"no wheel of torch {question.versions[0]} has code for all of them")
    return TorchChoice(
        way="wheel",
        environments=(_environment(wheel.torch, wheel.backend, question.cards),),
        reasons=tuple(reasons),
        rejected=_objections(question),
    )


def _conda(question: _Question) -> TorchChoice | None:
    conda = question.table.conda
    first, last = version_of(conda.first), version_of(conda.last)
    newest_first = [version for version in question.versions if first <= version_of(version) <= last]
    if not newest_first or any(not serving_arch(gpu.capability or "", conda.archs) for gpu in question.cards):
        return None
    return TorchChoice(
        way="conda",
        environments=(_environment(newest_first[0], conda.backend, question.cards),),
        reasons=(
            f"no wheel has code for {_join(question.cards)} at once",
            f"conda-forge's pytorch {newest_first[0]} (CUDA 12.9) has",
        ),
        rejected=_objections(question),
    )


def _groups(question: _Question) -> TorchChoice | None:
    for version in question.versions:
        environments = _cover(question, version)
        if environments:
            return TorchChoice(
                way="groups",
                environments=environments,
                reasons=(
                    f"no single build of torch {version} has code for {_join(question.cards)}",
                    "one environment per group of cards; the ranks meet over the cpu backend",
                ),
                rejected=_objections(question),
            )
    return None


def _cover(question: _Question, version: str) -> tuple[TorchEnvironment, ...]:
    """Greedy: repeatedly choose the wheel that serves most of the remaining cards."""
    left, found = list(question.cards), []
    while left:
        served = {wheel: _served(question, wheel, left) for wheel in question.table.of_version(version)}
        best = max(served, key=lambda wheel: len(served[wheel]), default=None)
        if best is None or not served[best]:
            return ()
        found.append(_environment(version, best.backend, tuple(served[best])))
        left = [gpu for gpu in left if gpu not in served[best]]
    return tuple(found)


def _build(question: _Question) -> TorchChoice | None:
    capabilities = tuple(sorted({gpu.capability or "" for gpu in question.cards}, key=capability_of))
    fitting = [cuda for cuda in question.table.compilers(capabilities) if not _driver_objection(question, cuda)]
    if not fitting:
        return None
    backend = f"source-cu{fitting[0].replace('.', '')}"
    environment = TorchEnvironment(
        torch=question.versions[0], backend=backend, cards=_names(question.cards), archs=capabilities
    )
    reason = f"no wheel has code for {_join(question.cards)} at once; CUDA {fitting[0]} can compile for them"
    return TorchChoice(way="build", environments=(environment,), reasons=(reason,), rejected=_objections(question))


def _nothing(question: _Question, way: Way | None) -> TorchChoice:
    what = f"--way {way} cannot serve" if way else "no build and no compiler serves"
    return TorchChoice(
        way="none",
        reasons=(f"{what} {_join(question.cards)}",),
        rejected=_objections(question),
        ways_out=("leave a card out: outrider setup --cards", TRAIN_ON_CPU, *(("leave --way out",) if way else ())),
    )


def _objections(question: _Question) -> tuple[str, ...]:
    """Why the wheels of the wanted version do not serve all cards."""
    wheels = question.table.of_version(question.versions[0])
    found = [(wheel, _objection(question, wheel, question.cards)) for wheel in wheels]
    return tuple(f"torch {wheel.torch} {wheel.backend}: {why}" for wheel, why in found if why)


def _objection(question: _Question, wheel: Wheel, cards: Sequence[Gpu]) -> str | None:
    driver = _driver_objection(question, wheel.cuda)
    if driver:
        return driver
    missing = [gpu for gpu in cards if not serving_arch(gpu.capability or "", wheel.archs)]
    return f"no code for {_join(missing)}" if missing else None


def _driver_objection(question: _Question, cuda: str) -> str | None:
    needed = question.table.minimum_driver(cuda)
    if question.driver and version_of(question.driver) < version_of(needed):
        return f"needs driver {needed}, found {question.driver}"
    return None


def _served(question: _Question, wheel: Wheel, cards: Sequence[Gpu]) -> list[Gpu]:
    return [gpu for gpu in cards if not _objection(question, wheel, [gpu])]


def _environment(torch: str, backend: str, cards: Sequence[Gpu]) -> TorchEnvironment:
    return TorchEnvironment(torch=torch, backend=backend, cards=_names(cards))


def _names(cards: Sequence[Gpu]) -> tuple[str, ...]:
    return tuple(gpu.name for gpu in cards)


def describe(gpu: Gpu) -> str:
    """A card with its architecture, `NVIDIA GeForce GTX 1060 6GB (sm_61)`."""
    return f"{gpu.name} ({sm(gpu.capability)})" if gpu.capability else gpu.name


def _join(cards: Sequence[Gpu]) -> str:
    counted = dict.fromkeys(map(describe, cards), 0)
    for gpu in cards:
        counted[describe(gpu)] += 1
    return " and ".join(f"{count} × {text}" if count > 1 else text for text, count in counted.items())
