"""Which torch environment a device runs in, where one build does not serve all cards.

Decides by what each build says of itself: architectures, CUDA against the driver, cuDNN. Called for
`environments="auto"`, and by the verdicts of diagnose. Starts nothing and installs nothing; `outrider setup --way
groups` makes the environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.machine.devices import DeviceSpec
from outrider.machine.machine_facts import Facts, Gpu, TorchBuild
from outrider.machine.torch_choice import describe
from outrider.machine.variants import Variant
from outrider.machine.wheels import WheelTable, capability_of, serving_arch, version_of


def serves(build: TorchBuild, gpu: Gpu, facts: Facts, table: WheelTable) -> bool:
    """Whether kernels of this build run on the card, under the driver of this machine."""
    if build.error is not None or not gpu.capability or not serving_arch(gpu.capability, build.archs):
        return False
    return driver_needed(build, gpu, facts, table) is None and not lacks_cudnn(build, gpu, table)


def driver_needed(build: TorchBuild, gpu: Gpu, facts: Facts, table: WheelTable) -> str | None:
    """The driver that the CUDA of this build needs, where the one found is older."""
    driver = facts.driver("nvidia")
    if gpu.vendor != "nvidia" or not build.cuda or driver is None or driver.version is None:
        return None
    needed = table.minimum_driver(build.cuda)
    return needed if version_of(driver.version) < version_of(needed) else None


def lacks_cudnn(build: TorchBuild, gpu: Gpu, table: WheelTable) -> bool:
    """Whether the cuDNN of this build has dropped the card."""
    if gpu.vendor != "nvidia" or build.cudnn is None or version_of(build.cudnn) < version_of(table.cudnn_drop.version):
        return False
    return capability_of(gpu.capability or "") < capability_of(table.cudnn_drop.below)


def first_serving(builds: Iterable[TorchBuild], gpu: Gpu, facts: Facts, table: WheelTable) -> TorchBuild | None:
    return next((build for build in builds if serves(build, gpu, facts, table)), None)


def as_builds(variants: Sequence[Variant], interpreter: dict[str, Path]) -> Iterator[TorchBuild]:
    """Torch variants as builds, the newest torch first; they were asked when they were made."""
    for variant in sorted(variants, key=lambda one: version_of(one.torch), reverse=True):
        yield TorchBuild(
            interpreter=str(interpreter[variant.name]),
            origin=variant.name,
            python=variant.python,
            version=variant.torch,
            cuda=variant.cuda,
            hip=variant.hip,
            archs=variant.archs,
            cudnn=variant.cudnn,
            nccl=variant.nccl,
        )


def choose_builds(
    devices: Sequence[DeviceSpec], builds: Sequence[TorchBuild], facts: Facts, table: WheelTable
) -> tuple[TorchBuild, ...]:
    """The build of each device: the first that serves it; the first of all for devices that are no cards."""
    cards = {gpu.device: gpu for gpu in facts.gpus}
    chosen = []
    for spec in devices:
        gpu = cards.get(spec.torch_name)
        # A card that NVML tells nothing about, such as a slice by MIG: only a try could say more.
        if gpu is None or not gpu.capability:
            chosen.append(builds[0])
            continue
        build = first_serving(builds, gpu, facts, table)
        if build is None:
            looked = ", ".join(f"{one.origin} (torch {one.version})" for one in builds)
            raise ConfigError(
                f"no environment has a torch that runs on {spec}, {describe(gpu)}; looked at {looked}",
                hint="`outrider setup --way groups` installs one per group of cards; --dry-run shows which",
            )
        chosen.append(build)
    return tuple(chosen)
