"""Judges facts: each verdict is ok, a warning or a failure, with a message, the reason and a hint.

Measures nothing, so recorded facts are judged like live ones. Called by diagnose; the forecast of the gain is next
door in forecast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from outrider.machine.drivers import driver_refusal
from outrider.machine.environment_choice import driver_needed, first_serving, lacks_cudnn
from outrider.machine.machine_facts import Facts, Gpu, Reduction, TorchBuild
from outrider.machine.torch_choice import describe
from outrider.machine.wheels import WheelTable, capability_of, serving_arch

Level = Literal["ok", "warning", "failure"]

SMALL_SHARED_BYTES = 2**30
NARROW_LINK_WIDTH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One judgement; `check` names the rule, for scripts."""

    check: str
    level: Level
    what: str
    why: str
    hint: str | None = None


def judge(facts: Facts, table: WheelTable) -> tuple[Verdict, ...]:
    """All verdicts, in the order in which a reader wants to solve them."""
    return (
        *_judge_sight(facts),
        *_judge_drivers(facts, table),
        *_judge_torches(facts),
        *_judge_cards(facts, table),
        *_judge_links(facts),
        *_judge_reductions(facts.reductions),
        *_judge_speeds(facts),
        *_judge_host(facts),
    )


def _judge_sight(facts: Facts) -> Iterator[Verdict]:
    for trouble in facts.troubles:
        yield Verdict(
            check="sight",
            level="failure",
            what=f"{trouble.what} cannot be read",
            why=trouble.why,
            hint="a driver updated without a reboot is the usual cause: reboot, or reload the kernel module",
        )
    if facts.num_hidden:
        yield _hidden(facts.num_hidden)
    if not facts.gpus and not facts.num_hidden and not facts.troubles:
        yield Verdict(check="sight", level="ok", what="no GPU", why="training runs on the CPU")


def _hidden(num_hidden: int) -> Verdict:
    cards = "1 card" if num_hidden == 1 else f"{num_hidden} cards"
    what = f"{cards} hidden by CUDA_VISIBLE_DEVICES, and not looked at"
    return Verdict(check="sight", level="ok", what=what, why="training sees only those that it names, numbered from 0")


def _judge_drivers(facts: Facts, table: WheelTable) -> Iterator[Verdict]:
    verdicts = list(_judge_nvidia_driver(facts, table))
    yield from verdicts
    if all(verdict.level == "ok" for verdict in verdicts):
        yield from (_unserved(gpu) for gpu in facts.gpus if not gpu.is_served)


def _judge_nvidia_driver(facts: Facts, table: WheelTable) -> Iterator[Verdict]:
    cards = [gpu for gpu in facts.gpus if gpu.vendor == "nvidia"]
    if not cards:
        return
    refusal = driver_refusal(facts, cards, table)
    if refusal:
        why, hint = "; ".join(refusal.reasons), "; ".join(refusal.ways_out)
        yield Verdict(check="driver", level="failure", what=refusal.what, why=why, hint=hint)
        return
    driver = facts.driver("nvidia")
    assert driver is not None
    flavour = f", {driver.flavour}" if driver.flavour else ""
    yield Verdict(
        check="driver",
        level="ok",
        what=f"driver {driver.version or 'of unknown version'} serves these cards",
        why=f"CUDA up to {driver.cuda or 'unknown'}{flavour}",
    )


def _unserved(gpu: Gpu) -> Verdict:
    return Verdict(
        check="driver",
        level="failure",
        what=f"{gpu.name} is on the bus, but no driver serves it",
        why=f"found at {gpu.pci_bus_id} by the kernel only",
        hint=f"check `dmesg | grep {gpu.pci_bus_id}`; another driver (nouveau, vfio-pci) may hold the card",
    )


def _judge_torches(facts: Facts) -> Iterator[Verdict]:
    if not facts.torches:
        yield Verdict(
            check="torch",
            level="warning",
            what="no torch was found",
            why="no interpreter here can import it",
            hint="run `outrider setup`",
        )
    for build in facts.torches:
        if build.error is not None:
            yield Verdict(
                check="torch",
                level="failure" if build is facts.torch else "warning",
                what=f"the torch of {build.origin} cannot be imported",
                why=build.error,
                hint=f"reinstall it, or run `outrider setup`; asked {build.interpreter}",
            )


def _judge_cards(facts: Facts, table: WheelTable) -> Iterator[Verdict]:
    build = facts.torch
    if build is None or build.error is not None:
        return
    for gpu in facts.gpus:
        # What the driver does not offer is told there; no build would help.
        if gpu.vendor not in ("nvidia", "amd") or not gpu.capability or not gpu.is_served:
            continue
        verdict = _judge_driver_of(build, gpu, facts, table) or _judge_build(build, gpu)
        yield verdict if verdict.level == "ok" else _elsewhere(verdict, gpu, facts, table) or verdict
        if verdict.level == "ok" and gpu.vendor == "nvidia":
            yield from _judge_features(build, gpu, table)


def _elsewhere(verdict: Verdict, gpu: Gpu, facts: Facts, table: WheelTable) -> Verdict | None:
    """No failure where another environment serves the card: its rank can run there."""
    other = first_serving(facts.torches, gpu, facts, table)
    if other is None:
        return None
    return replace(
        verdict,
        level="warning",
        why=f"{verdict.why}; torch {other.version} of {other.origin} runs on it",
        hint='start the ranks with `outrider run --environments auto`, or pass environments="auto"',
    )


def _judge_build(build: TorchBuild, gpu: Gpu) -> Verdict:
    arch = serving_arch(gpu.capability or "", build.archs)
    if arch:
        what = f"torch {build.version} runs on {describe(gpu)}"
        return Verdict(check="build", level="ok", what=what, why=f"it holds {arch}")
    holds = ", ".join(build.archs) or "no GPU code at all"
    return Verdict(
        check="build",
        level="failure",
        what=f"torch {build.version} does not run on {describe(gpu)}",
        why=f"it holds {holds}; the first kernel would fail",
        hint="run `outrider setup --dry-run` for a build that does",
    )


def _judge_driver_of(build: TorchBuild, gpu: Gpu, facts: Facts, table: WheelTable) -> Verdict | None:
    """A failure if the build's CUDA is too new for the driver, unless the card did compute."""
    has_computed = any(speed.device == gpu.device and speed.error is None for speed in facts.speeds)
    needed = driver_needed(build, gpu, facts, table)
    driver = facts.driver("nvidia")
    if needed is None or has_computed or driver is None:
        return None
    return Verdict(
        check="build",
        level="failure",
        what=f"torch {build.version} does not run on {describe(gpu)}",
        why=f"its CUDA {build.cuda} needs driver {needed}, found {driver.version}",
        hint="update the driver, or run `outrider setup --dry-run` for a build that fits",
    )


def _judge_features(build: TorchBuild, gpu: Gpu, table: WheelTable) -> Iterator[Verdict]:
    capability = capability_of(gpu.capability or "")
    why = f"Triton needs {table.triton_from}, the card has {gpu.capability}"
    if capability >= capability_of(table.triton_from):
        yield Verdict(check="compile", level="ok", what=f"torch.compile can serve {describe(gpu)}", why=why)
    else:
        yield Verdict(
            check="compile",
            level="warning",
            what=f"torch.compile does not work on {describe(gpu)}",
            why=why,
            hint="train eager there, or with CUDA graphs",
        )
    drop = table.cudnn_drop
    if lacks_cudnn(build, gpu, table):
        yield Verdict(
            check="cudnn",
            level="failure",
            what=f"cuDNN {build.cudnn} has no code for {describe(gpu)}",
            why=f"from {drop.version} on it needs {drop.below}",
            hint="take a build with cuDNN 9.10 (cu126), or set torch.backends.cudnn.enabled = False",
        )


def _judge_links(facts: Facts) -> Iterator[Verdict]:
    for gpu in facts.gpus:
        if gpu.throttle_reasons:
            yield Verdict(
                check="throttle",
                level="warning",
                what=f"{gpu.name} is slowed down",
                why=", ".join(gpu.throttle_reasons),
                hint="check cooling and power; a steady slowdown is measured and planned for",
            )
        if gpu.is_served and _is_narrow(gpu):
            yield Verdict(
                check="pcie",
                level="warning",
                what=f"{gpu.name} sits on {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes",
                why="averages and batches cross this link",
                hint="another slot may be wider; cadence and async average less often",
            )
        if gpu.is_mig:
            yield _mig(gpu)
    yield from _judge_peers(facts)


def _is_narrow(gpu: Gpu) -> bool:
    width, best = gpu.pcie_width, gpu.pcie_max_width
    return width is not None and best is not None and width <= NARROW_LINK_WIDTH < best


def _judge_peers(facts: Facts) -> Iterator[Verdict]:
    if facts.links and all(link.has_peer_access for link in facts.links):
        yield Verdict(check="peer", level="ok", what="peer access between all cards", why=f"by {facts.links[0].source}")
    denied = [link for link in facts.links if link.has_peer_access is False]
    if denied:
        pairs = ", ".join(f"{link.first}-{link.second}" for link in denied)
        yield Verdict(
            check="peer",
            level="warning",
            what=f"no peer access between cards {pairs}",
            why="NCCL goes through host memory there",
            hint="normal on consumer cards; cadence and async hide it",
        )


def _mig(gpu: Gpu) -> Verdict:
    slices = ", ".join(piece.name.removeprefix(f"{gpu.name} ") for piece in gpu.mig_slices)
    if not slices:
        return Verdict(
            check="mig",
            level="failure",
            what=f"{gpu.name} is in MIG mode without a slice",
            why="a process can use a slice, not the card",
            hint="make slices with `nvidia-smi mig -cgi`, or turn MIG off with `nvidia-smi -mig 0`",
        )
    return Verdict(
        check="mig",
        level="warning",
        what=f"{gpu.name} is cut into MIG slices",
        why=f"{slices}; one process sees one slice, and NCCL does not join slices",
        hint="one rank per slice by CUDA_VISIBLE_DEVICES, and backend cpu",
    )


def _judge_reductions(reductions: tuple[Reduction, ...]) -> Iterator[Verdict]:
    for reduction in reductions:
        pair = " + ".join(reduction.devices)
        settings = f" with {_settings(reduction)}" if reduction.environment else ""
        name = f"{reduction.backend} all-reduce on {pair}{settings}"
        if reduction.outcome == "ok":
            yield Verdict(check="all-reduce", level="ok", what=f"{name} works", why="the numbers were compared")
        else:
            yield _bad_reduction(reduction, name, reductions)


def _bad_reduction(reduction: Reduction, name: str, others: tuple[Reduction, ...]) -> Verdict:
    problem = {"wrong": "gives wrong numbers", "hang": "hangs", "error": "fails"}[reduction.outcome]
    cure = next((other for other in others if _cures(other, reduction)), None)
    if cure:
        hint = f"set {_settings(cure)}: the same all-reduce works with it"
    else:
        hint = "train with backend cpu" if reduction.backend == "nccl" else "check the loopback interface"
    return Verdict(
        check="all-reduce", level="failure", what=f"{name} {problem}", why=reduction.detail or "no detail", hint=hint
    )


def _cures(other: Reduction, bad: Reduction) -> bool:
    is_same = (other.backend, other.devices) == (bad.backend, bad.devices)
    return is_same and other.outcome == "ok" and bool(other.environment)


def _settings(reduction: Reduction) -> str:
    return " ".join(f"{key}={value}" for key, value in reduction.environment.items())


def _judge_speeds(facts: Facts) -> Iterator[Verdict]:
    for speed in facts.speeds:
        if speed.error is not None:
            yield Verdict(
                check="speed",
                level="failure",
                what=f"{speed.device} failed a matrix multiplication",
                why=speed.error,
                hint="another process may fill the card: see `nvidia-smi`",
            )


def _judge_host(facts: Facts) -> Iterator[Verdict]:
    shared = facts.memory.shared_bytes
    if shared is None:
        return
    size = f"{shared / 2**30:.1f} GiB"
    if shared >= SMALL_SHARED_BYTES:
        yield Verdict(check="shared-memory", level="ok", what=f"{size} of shared memory", why="enough for data workers")
        return
    yield Verdict(
        check="shared-memory",
        level="warning",
        what=f"only {shared / 2**20:.0f} MiB of shared memory",
        why="data workers hand batches through /dev/shm and die when it is full",
        hint="docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium Memory",
    )
