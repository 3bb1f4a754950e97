"""An iteration benchmark as text, and the cost of our policies relative to torch's DDP.

Decides words and layout, and how interleaved blocks of iterations are paired to give a ratio. Called by `outrider bench
iteration`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch

from outrider.average.transport.backend_table import choose_backend
from outrider.bench.iteration.iteration_measure import entry_name
from outrider.bench.iteration.iteration_plan import BLOCK, IterationPlan
from outrider.bench.iteration.iteration_record import OTHERS_KEY, ModelTimings, Timing, document
from outrider.bench.iteration.machine_state import read_topology
from outrider.bench.iteration.models import takes_any_size
from outrider.bench.statistics import Interval, bootstrap_interval
from outrider.bench.tables import text_table
from outrider.machine.devices import num_cores, threads_per_rank
from outrider.machine.nvml import read_nvml
from outrider.policy.policies import SHARED_STEP_POLICIES
from outrider.record.run_record import commit, environment


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """How much longer an iteration takes, as a part of the other's; negative is quicker."""

    part: float
    """Median over the pairs of blocks."""
    interval: Interval | None
    """Of the median, with 95 % confidence; None if there is one pair only."""
    num_blocks: int

    def against(self, name: str) -> str:
        """In words, such as `0.4 % slower per iteration than torch DDP (…)`."""
        span = ""
        if self.interval is not None:
            span = f", 95 % interval {100 * self.interval.low:+.1f} % to {100 * self.interval.high:+.1f} %"
        blocks = f"{self.num_blocks} pair{'' if self.num_blocks == 1 else 's'} of interleaved blocks"
        direction = "slower" if self.part > 0 else "quicker"
        return f"{100 * abs(self.part):.1f} % {direction} per iteration than {name} ({blocks}{span})"


def overhead(ours: Timing, theirs: Timing) -> Overhead:
    """`ours` against `theirs`, measured in the same processes."""
    parts = [mine / other - 1 for mine, other in zip(_blocks(ours), _blocks(theirs), strict=True)]
    return Overhead(
        part=median(parts),
        interval=bootstrap_interval([parts], lambda groups: median(groups[0])),
        num_blocks=len(parts),
    )


def _blocks(timing: Timing) -> list[float]:
    """The median iteration of each block, which single disturbances do not change."""
    return [median(block) for times in timing.iterations() for block in _cut(times)]


def _cut(times: Sequence[float]) -> Iterator[Sequence[float]]:
    for start in range(0, len(times), BLOCK):
        yield times[start : start + BLOCK]


def mean_s(timing: Timing) -> float:
    return fmean(timing.measurements)


PERCENTS = (50, 75, 90, 95)
HEADERS = ("", *(text for percent in PERCENTS for text in (f"p{percent} sec/iter", "ex/sec")), "mean ex/sec")


def surroundings(plan: IterationPlan, others_part: float | None) -> dict[str, Any]:
    """The environment of the numbers; `others_part` is the processor use of other programs meanwhile."""
    driver = read_nvml().driver
    return environment() | {
        "host": socket.gethostname(),
        "threads_per_rank": min(threads_per_rank(plan.devices, num_cores())),
        "nccl": _nccl_version(),
        "driver": driver.version if driver else None,
        "topology": read_topology(),
        OTHERS_KEY: None if others_part is None else round(others_part, 3),
    }


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def library(plan: IterationPlan) -> str:
    """What torch's DDP communicates with, by PyTorch's name for it."""
    asked = "cpu" if plan.backend == "gloo" else plan.backend
    return "gloo" if choose_backend(asked, plan.devices).backend == "cpu" else "nccl"


def header(plan: IterationPlan, facts: dict[str, Any], backend: str) -> str:
    """Above the tables."""
    shown = {
        "torch": facts["torch"],
        "CUDA": facts["cuda"],
        "backend": f"{backend}{'' if facts['nccl'] is None else ', NCCL ' + facts['nccl']}",
        "driver": facts["driver"],
        "devices": ", ".join(map(str, plan.devices)),
        "processor": f"{facts['cpu']}, {facts['num_cores']} cores, {facts['threads_per_rank']} threads per rank",
        "others": None
        if facts[OTHERS_KEY] is None
        else f"other programs used {facts[OTHERS_KEY]:.0%} of the processor",
        "GPUs": ", ".join(facts["gpus"]) or None,
        "bucket": f"{plan.bucket_mb} MB",
        "input": _input_words(plan),
        "measured": f"{plan.rounds} rounds of {plan.iterations} iterations after {plan.warmup} of warm-up, "
        f"runtimes in turn every {BLOCK}",
    }
    lines = [f"{name + ':':11}{value}" for name, value in shown.items() if value is not None]
    if facts["topology"]:
        lines += ["", facts["topology"]]
    return "\n".join(lines)


def _input_words(plan: IterationPlan) -> str:
    words = [f"batch {plan.batch_size} per rank"]
    if any(takes_any_size(name) for name in plan.models):
        words.append(f"images of {plan.image_size} × {plan.image_size}")
    return ", ".join(
        [*words, plan.precision, *(["compiled"] if plan.is_compiled else []), f"our steps {plan.execution}"]
    )


def render(models: Sequence[ModelTimings]) -> str:
    """A table per model and loop; examples per second are of one rank, as PyTorch counts them."""
    parts = []
    for one in models:
        rows = [_cells(one, timing) for timing in one.timings]
        parts.append(f"{one.model}, batch size {one.batch_size}\n{text_table(HEADERS, rows)}")
    return "\n\n".join(parts)


def _cells(one: ModelTimings, timing: Timing) -> list[str]:
    cells = [timing.label]
    for percent in PERCENTS:
        seconds = timing.percentile(percent)
        cells += [f"{seconds:.4f}", f"{one.batch_size / seconds:,.0f}"]
    return [*cells, f"{one.batch_size / mean_s(timing):,.0f}"]


def overheads(plan: IterationPlan, models: Sequence[ModelTimings]) -> list[str]:
    """Sentences that compare our policies that average at every step with torch's DDP in the same processes."""
    by_name = {one.model: one for one in models}
    shared = [policy for policy in plan.policies if policy in SHARED_STEP_POLICIES]
    return [
        f"{model}, {ours.label}: {policy} is {overhead(ours, theirs).against('torch DDP')}"
        for model in plan.models
        for policy in shared
        for ours, theirs in zip(by_name[entry_name(model, policy)].timings, by_name[model].timings, strict=True)
        if not ours.is_plain
    ]


def iteration_document(
    plan: IterationPlan, models: Sequence[ModelTimings], facts: dict[str, Any], backend: str
) -> dict[str, Any]:
    """What `--json` writes."""
    settings = asdict(plan) | {"devices": [str(spec) for spec in plan.devices]}
    hidden = ("models", "bucket_mb", "timeout_s")
    return document(
        pytorch_version=facts["torch"],
        cuda_version=facts["cuda"],
        distributed_backend=backend,
        bucket_size=plan.bucket_mb,
        models=models,
        own={
            "commit": commit(),
            "settings": {name: value for name, value in settings.items() if name not in hidden} | {"block": BLOCK},
            "environment": facts,
        },
    )
