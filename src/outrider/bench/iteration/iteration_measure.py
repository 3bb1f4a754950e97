"""Measures the time of an iteration: without DDP, then on 1, 2, 4 … ranks with torch's DDP and our policies.

Decides which worlds are measured and collects the times: in fresh processes for every measurement, rounds in the outer
loop; or in the processes of torchrun, on one machine or several. Called by `outrider bench iteration`.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.iteration.iteration_plan import PLAIN, IterationPlan, world_sizes
from outrider.bench.iteration.iteration_rank import Times, measure_world, run_iteration_rank
from outrider.bench.iteration.iteration_record import DDP, OURS, ModelTimings, Timing
from outrider.bench.iteration.machine_state import check_machines
from outrider.errors import OutriderError
from outrider.launch.forkserver import TRAINING
from outrider.launch.launcher import launch
from outrider.machine.devices import num_cores, threads_per_rank
from outrider.world.environment import Environment
from outrider.world.messages import Link, adopted_link
from outrider.world.store import kept_store
from outrider.world.world import World

Tell = Callable[[str], None]
# torchrun counts its restarts; each has this many worlds of its own.
_MOST_WORLDS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMeasurement:
    """One world of one model in one round."""

    model: str
    world_size: int
    times: Times


def measure(plan: IterationPlan, *, tell: Tell) -> list[ModelTimings]:
    """All rounds, each measurement in processes of its own."""
    return collect(plan, list(_measure_started(plan, tell)))


def measure_adopted(plan: IterationPlan, environment: Environment, *, tell: Tell) -> list[ModelTimings] | None:
    """The same in ranks that exist already; the result on rank 0, None on the others."""
    measured = list(_measure_adopted(plan, environment, tell))
    return collect(plan, measured) if environment.rank == 0 else None


def _jobs(plan: IterationPlan, num_ranks: int) -> Iterator[tuple[str, int]]:
    for _ in range(plan.rounds):
        for model in plan.models:
            for world_size in world_sizes(num_ranks):
                yield model, world_size


def _measure_started(plan: IterationPlan, tell: Tell) -> Iterator[IterationMeasurement]:
    jobs = list(_jobs(plan, len(plan.devices)))
    for number, (model, world_size) in enumerate(jobs, start=1):
        tell(f"{number} of {len(jobs)}: {model} on {world_size} rank{'' if world_size == 1 else 's'}")
        yield IterationMeasurement(model=model, world_size=world_size, times=_in_new_processes(plan, model, world_size))


def _in_new_processes(plan: IterationPlan, model: str, world_size: int) -> Times:
    # A rank has the same number of threads in all worlds, so that worlds differ in their size only.
    num_threads = min(threads_per_rank(plan.devices, num_cores()))
    with (
        tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-") as folder,
        launch(
            run_iteration_rank,
            {"plan": plan, "model": model},
            devices=plan.devices[:world_size],
            log_dir=Path(folder),
            imports=TRAINING,
            num_threads=num_threads,
        ) as ranks,
    ):
        told = [message.fields["times"] for message in ranks.messages() if message.kind == "measured"]
        ranks.raise_error()
    if not told:
        raise OutriderError(f"the ranks of {model} ended without a word", hint="run it again")
    times: Times = told[0]
    return times


def _measure_adopted(plan: IterationPlan, environment: Environment, tell: Tell) -> Iterator[IterationMeasurement]:
    everyone = range(environment.world_size)
    # Worlds come and go, so the store that they meet in must outlive each.
    with kept_store(environment) as environment:
        check_machines(adopted_seat(plan, environment, everyone, number=0), timeout_s=plan.timeout_s)
        for number, (model, world_size) in enumerate(_jobs(plan, environment.world_size), start=1):
            if environment.rank >= world_size:
                _sit_out(plan, adopted_seat(plan, environment, everyone[world_size:], number=number))
                continue
            seat = adopted_seat(plan, environment, everyone[:world_size], number=number)
            times = measure_world(seat, plan, model)
            if times is not None:
                tell(f"{model} on {world_size} rank{'' if world_size == 1 else 's'}: done")
                yield IterationMeasurement(model=model, world_size=world_size, times=times)


def _sit_out(plan: IterationPlan, seat: Link) -> None:
    """Ranks that are not measured form a world of their own: all must have joined equally many to meet again."""
    with World.join(seat, timeout_s=plan.timeout_s):
        pass


def adopted_seat(plan: IterationPlan, environment: Environment, ranks: range, *, number: int) -> Link:
    """This rank in a world of these ranks only; the number gives that world keys of its own in the store."""
    first_here = environment.rank - environment.local_rank
    here = range(max(ranks.start, first_here), min(ranks.stop, first_here + environment.local_world_size))
    seat = replace(
        environment,
        rank=environment.rank - ranks.start,
        world_size=len(ranks),
        local_world_size=len(here),
        has_store=True,
        attempt=environment.attempt * _MOST_WORLDS + 2 * number + (ranks.start > 0),
    )
    num_threads = min(threads_per_rank(plan.devices, num_cores()))
    return adopted_link(seat, devices=plan.devices, num_threads=num_threads)


def collect(plan: IterationPlan, measured: list[IterationMeasurement]) -> list[ModelTimings]:
    """All rounds of one model and one loop (DDP or a policy) together; the run without DDP comes first in each."""
    rounds: defaultdict[tuple[str, str, int], list[list[list[float]]]] = defaultdict(list)
    for one in measured:
        for runtime, ranks in one.times.items():
            rounds[one.model, runtime, one.world_size].append(ranks)
    return [_model_timings(plan, model, runtime, rounds) for model in plan.models for runtime in (DDP, *plan.policies)]


def _model_timings(
    plan: IterationPlan, model: str, runtime: str, rounds: dict[tuple[str, str, int], list[list[list[float]]]]
) -> ModelTimings:
    sizes = sorted(size for name, of, size in rounds if name == model and of == runtime)
    wrapped = [_timing(rounds[model, runtime, size], is_plain=False) for size in sizes]
    return ModelTimings(
        model=entry_name(model, runtime),
        batch_size=plan.batch_size,
        timings=(_timing(rounds[model, PLAIN, 1], is_plain=True), *wrapped),
    )


def entry_name(model: str, runtime: str) -> str:
    """Torch's DDP goes by the model's name alone, as in PyTorch's files."""
    return model if runtime == DDP else f"{model}{OURS}{runtime})"


def _timing(rounds: list[list[list[float]]], *, is_plain: bool) -> Timing:
    return Timing(
        num_ranks=len(rounds[0]),
        is_plain=is_plain,
        measurements=tuple(time_s for ranks in rounds for times in ranks for time_s in times),
        rounds=tuple(tuple(len(times) for times in ranks) for ranks in rounds),
    )
