"""Writes a diagnosis as text for a terminal of 80 columns, readable without colour.

Decides nothing about the machine. Called by the command line and by report.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from outrider.machine.capability import sm
from outrider.machine.diagnose import Diagnosis
from outrider.machine.facts import Disk, Driver, Facts, Gpu, Memory, Sources, TorchBuild
from outrider.machine.forecast import Forecast
from outrider.machine.verdicts import Verdict

WIDTH = 80
_LABEL = 10

Paint = Callable[[str], str]
"""Colours a level word (`ok`, `warning`, `failure`); the identity where colour is not wanted."""


def render(diagnosis: Diagnosis, *, paint: Paint) -> str:
    """The whole diagnosis, ending in one line of counts."""
    blocks = [_block("Machine", _machine_lines(diagnosis.facts))]
    blocks.append(
        _block("Verdicts", [line for verdict in diagnosis.verdicts for line in _verdict_lines(verdict, paint)])
    )
    if diagnosis.forecast:
        blocks.append(_block("Expected gain over the fastest device alone", list(_forecast_lines(diagnosis.forecast))))
    blocks.append(_summary(diagnosis))
    return "\n\n".join(blocks) + "\n"


def _block(title: str, lines: list[str]) -> str:
    return "\n".join([title, *lines])


def _machine_lines(facts: Facts) -> list[str]:
    rows: list[tuple[str, str]] = []
    if facts.origin:
        rows.append(("recorded", facts.origin))
    rows += [
        ("system", _system(facts)),
        ("cpu", _cpu(facts)),
        ("memory", _memory(facts.memory)),
        ("disk", _disk(facts.disk)),
    ]
    rows += [("driver", _driver(driver)) for driver in facts.drivers]
    for gpu in facts.gpus:
        rows += [(gpu.device if gpu.is_served else "card", line) for line in _gpu(gpu)]
    rows += [("toolkit", f"CUDA {toolkit.version} at {toolkit.path}") for toolkit in facts.toolkits]
    rows += [("library", f"{item.name} {item.version or '?'} at {item.path}") for item in facts.libraries]
    if facts.docker:
        runtime = "with" if facts.docker.has_nvidia_runtime else "without"
        rows.append(("docker", f"{facts.docker.version or '?'}, {runtime} the NVIDIA runtime"))
    rows.append(("network", _network(facts)))
    for build in facts.torches:
        rows += [("torch", line) for line in _torch(build)]
    rows += [("speed", line) for line in _speeds(facts)]
    return list(_rows(rows))


def _rows(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Labelled lines, a repeated label written once, long texts wrapped under themselves."""
    previous = None
    for label, text in rows:
        shown = "" if label == previous else label
        previous = label
        yield from _wrap(text, first=f"  {shown:<{_LABEL}}", rest=" " * (_LABEL + 2))


def _wrap(text: str, *, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    ) or [first.rstrip()]


def _system(facts: Facts) -> str:
    host = facts.host
    place = [host.container or "", "WSL2" if host.is_wsl else ""]
    parts = [
        host.distribution or host.system,
        f"kernel {host.kernel}" if host.kernel else "",
        host.architecture,
        *place,
    ]
    return ", ".join(part for part in [*parts, f"Python {host.python}" if host.python else ""] if part)


def _cpu(facts: Facts) -> str:
    cpu = facts.cpu
    counts = f"{cpu.cores or '?'} cores, {cpu.threads or '?'} threads, {cpu.usable or '?'} usable"
    return f"{cpu.model or 'unknown model'}, {counts}"


def _memory(memory: Memory) -> str:
    total, free = _gib(memory.total_bytes), _gib(memory.available_bytes)
    return f"{total}, {free} available, {_gib(memory.shared_bytes)} shared"


def _disk(disk: Disk) -> str:
    return f"{_gib(disk.free_bytes)} free of {_gib(disk.total_bytes)}"


def _driver(driver: Driver) -> str:
    parts = [f"{driver.vendor} {driver.version or 'version unknown'}"]
    if driver.cuda:
        parts.append(f"CUDA up to {driver.cuda}")
    if driver.flavour:
        parts.append(driver.flavour if driver.flavour == "wsl" else f"{driver.flavour} kernel module")
    if driver.is_mps_running:
        parts.append("MPS running")
    return ", ".join(parts) + _origin(
        {key: driver.sources[key] for key in ("version", "flavour") if key in driver.sources}
    )


def _gpu(gpu: Gpu) -> Iterator[str]:
    architecture = sm(gpu.capability) if gpu.capability else "architecture unknown"
    state = "" if gpu.is_served else ", not served by its driver"
    yield f"{gpu.name}, {architecture}, {_gib(gpu.memory_bytes)}{state}{_origin(gpu.sources)}"
    details = [_pcie(gpu), _clocks(gpu), _power(gpu), *gpu.throttle_reasons]
    shown = ", ".join(part for part in details if part)
    if shown:
        yield shown
    for piece in gpu.mig_slices:
        yield f"{piece.name.removeprefix(f'{gpu.name} ')}, {_gib(piece.memory_bytes)}"


def _pcie(gpu: Gpu) -> str:
    if gpu.pcie_generation is None or gpu.pcie_width is None:
        return ""
    now = f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}"
    best = (gpu.pcie_max_generation, gpu.pcie_max_width)
    is_best = best == (gpu.pcie_generation, gpu.pcie_width) or None in best
    return now if is_best else f"{now} (of {best[0]}.0 x{best[1]})"


def _clocks(gpu: Gpu) -> str:
    return f"SM {gpu.sm_clock_mhz} of {gpu.max_sm_clock_mhz or '?'} MHz" if gpu.sm_clock_mhz else ""


def _power(gpu: Gpu) -> str:
    return f"{gpu.power_w:.0f} of {gpu.power_limit_w or 0:.0f} W" if gpu.power_w else ""


def _network(facts: Facts) -> str:
    names = [
        f"{item.name} {item.speed_mbit_per_s} Mbit/s" if item.speed_mbit_per_s else item.name
        for item in facts.interfaces
        if item.is_up
    ]
    return ", ".join(names) or "no interface is up"


def _torch(build: TorchBuild) -> Iterator[str]:
    if build.error is not None:
        yield f"cannot be imported ({build.origin})"
        return
    parts = [f"CUDA {build.cuda}" if build.cuda else "", f"ROCm {build.hip}" if build.hip else ""]
    parts += [f"cuDNN {build.cudnn}" if build.cudnn else "", f"NCCL {build.nccl}" if build.nccl else ""]
    shown = ", ".join(part for part in parts if part) or "CPU only"
    yield f"{build.version} ({build.origin}): {shown}"
    if build.archs:
        yield " ".join(build.archs)


def _speeds(facts: Facts) -> Iterator[str]:
    for speed in facts.speeds:
        if speed.matmul_tflops and speed.memory_gb_per_s:
            yield f"{speed.device:<8} {speed.matmul_tflops:8.2f} TFLOP/s float32, {speed.memory_gb_per_s:7.0f} GB/s"


def _verdict_lines(verdict: Verdict, paint: Paint) -> list[str]:
    indent = " " * (_LABEL + 2)
    word = f"{verdict.level:<{_LABEL}}"
    lines = _wrap(verdict.what, first=f"  {word}", rest=indent)
    # Painted after wrapping, so that colour codes do not count as width.
    lines[0] = lines[0].replace(word, paint(word), 1)
    if verdict.level != "ok":
        lines += _wrap(verdict.why, first=indent, rest=indent)
    if verdict.hint:
        lines += _wrap(f"hint: {verdict.hint}", first=indent, rest=f"{indent}      ")
    return lines


def _forecast_lines(forecast: Forecast) -> Iterator[str]:
    for device in forecast.devices:
        yield f"  {device.device:<{_LABEL}}{device.relative:>5.0%}   {device.name}"
    for gain in forecast.gains:
        yield f"  {gain.policy:<{_LABEL}}{gain.gain:>5.2f} ×  {gain.formula}"
    yield from _rows([("advice", forecast.advice), *(("assumed", text) for text in forecast.assumptions)])


def _summary(diagnosis: Diagnosis) -> str:
    failures, warnings = diagnosis.count("failure"), diagnosis.count("warning")
    return f"{_counted(failures, 'failure')}, {_counted(warnings, 'warning')}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _origin(sources: Sources) -> str:
    places = list(dict.fromkeys(sources.values()))
    return f" ({', '.join(places)})" if places else ""


def _gib(num_bytes: int | None) -> str:
    return "? GiB" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
