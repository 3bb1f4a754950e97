"""Puts facts, verdicts and forecast together: as text for a terminal, as JSON, and without names for a public issue.

Decides the exit code, the layout for 80 columns without colour, and what a public report must not hold: host name, user
name, home folder, addresses and serial numbers. Called by `outrider diagnose`.
"""

from __future__ import annotations

import getpass
import re
import socket
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.machine import codec
from outrider.machine.device_memory import judge_memory
from outrider.machine.devices import DeviceSpec
from outrider.machine.forecast import Forecast
from outrider.machine.machine_facts import Disk, Facts, Gpu, GpuDriver, Memory, Sources, TorchBuild
from outrider.machine.verdicts import Level, Verdict, judge
from outrider.machine.wheels import WheelTable, sm

EXIT_FINE = 0
EXIT_FINDING = 1
EXIT_CANNOT_LOOK = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What is known of a machine and what to think of it."""

    facts: Facts
    verdicts: tuple[Verdict, ...]
    forecast: Forecast | None

    @property
    def exit_code(self) -> int:
        """0 without a failure, 1 with one, 3 if something could not be looked at and so not be judged."""
        if self.facts.troubles:
            return EXIT_CANNOT_LOOK
        return EXIT_FINDING if self.count("failure") else EXIT_FINE

    def count(self, level: Level) -> int:
        return sum(verdict.level == level for verdict in self.verdicts)


def diagnose(
    facts: Facts, table: WheelTable, *, forecast: Forecast | None, devices: Sequence[DeviceSpec] = ()
) -> Diagnosis:
    """Judge these facts, and the memory of `devices` if some are named; `forecast` is shown beside the verdicts."""
    return Diagnosis(facts=facts, verdicts=(*judge(facts, table), *judge_memory(facts, devices)), forecast=forecast)


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """One document: the facts, which `--facts` reads back, the verdicts and the forecast."""
    return {
        "schema_version": 1,
        "exit_code": diagnosis.exit_code,
        "facts": codec.encode(diagnosis.facts),
        "verdicts": [codec.encode(verdict) for verdict in diagnosis.verdicts],
        "forecast": codec.encode(diagnosis.forecast) if diagnosis.forecast else None,
    }


WIDTH = 80
_LABEL = 10

Paint = Callable[[str], str]
"""Colours a level word (`ok`, `warning`, `failure`); the identity if colour is not wanted."""


def render(diagnosis: Diagnosis, *, paint: Paint) -> str:
    """The whole diagnosis, ending in one line of counts."""
    verdicts = [line for verdict in diagnosis.verdicts for line in _verdict_lines(verdict, paint)]
    blocks = [["Machine", *_machine_lines(diagnosis.facts)], ["Verdicts", *verdicts]]
    if diagnosis.forecast:
        blocks.append(["Expected gain over the fastest device alone", *_forecast_lines(diagnosis.forecast)])
    return "\n\n".join("\n".join(block) for block in (*blocks, [_summary(diagnosis)])) + "\n"


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


def _driver(driver: GpuDriver) -> str:
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
        memory = "" if device.memory_bytes is None else f", {_gib(device.memory_bytes)}"
        yield f"  {device.device:<{_LABEL}}{device.relative:>5.0%}   {device.name}{memory}"
    for gain in forecast.gains:
        shares = f"waiting {gain.wait_fraction:.0%}, averaging {gain.average_fraction:.0%} of the time"
        yield f"  {gain.policy:<{_LABEL}}{gain.gain:>5.2f} ×  {shares}"
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


_SHORTEST_NAME = 3
"""A user called `a` would take every a with it."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"\b(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b", "<mac>"),
    (r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", "<address>"),
    (r"(?i)\b(serial(?: number)?\s*[:=]\s*)\S+", r"\1<serial>"),
    (r"(/home/|/Users/)[^/\s]+", r"\1<user>"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Names that must not appear."""

    user: str
    host: str
    home: str


def make_report(diagnosis: Diagnosis, identity: Identity) -> str:
    """A Markdown block to paste into an issue."""
    body = clean(render(diagnosis, paint=str), identity)
    return f"### outrider {__version__}, `outrider diagnose --report`\n\n```text\n{body}```\n"


def clean(text: str, identity: Identity) -> str:
    """The text without anything that names a person, a host or one piece of hardware."""
    if identity.home not in ("", "/"):
        text = text.replace(identity.home, "~")
    for pattern, replacement in _PATTERNS:
        text = re.sub(pattern, replacement, text)
    for name, replacement in ((identity.host, "<host>"), (identity.user, "<user>")):
        if len(name) >= _SHORTEST_NAME:
            text = re.sub(rf"(?<![\w<]){re.escape(name)}(?!\w)", replacement, text)
    return text


def this_identity() -> Identity:
    """The names of this user and host."""
    return Identity(user=_known(getpass.getuser), host=socket.gethostname(), home=str(Path.home()))


def _known(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (KeyError, OSError):
        return ""
