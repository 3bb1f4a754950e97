"""One rank of an iteration benchmark: builds every loop (DDP and policies), and runs them in turn in one process.

Decides the order: warm-up, then alternating blocks, so that disturbances affect all loops alike. `loops` decides what
an iteration is. Called in fresh processes of our launcher, or in those of torchrun.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

from outrider.average.transport.backend_table import choose_backend
from outrider.bench.iteration.iteration_plan import BLOCK, PLAIN, IterationPlan, first_at, runtimes
from outrider.bench.iteration.iteration_record import DDP
from outrider.bench.iteration.loops import IterationLoop, OutriderLoop, TorchLoop, ddp_model, make_replica
from outrider.bench.iteration.models import Workload, workload_named
from outrider.policy.policies import SHARED_STEP_POLICIES
from outrider.rank.throttle import Throttle
from outrider.world.messages import Link
from outrider.world.world import World

Times = dict[str, list[list[float]]]
"""Seconds per iteration by loop and rank."""


def run_iteration_rank(link: Link, *, plan: IterationPlan, model: str) -> None:
    """The function of each process: measures, and sends the times of all ranks from rank 0."""
    times = measure_world(link, plan, model)
    if times is not None:
        link.send("measured", times=times)


def measure_world(link: Link, plan: IterationPlan, model: str) -> Times | None:
    """Measure all loops in this world; returns the times on rank 0, None on the others."""
    with World.join(link, timeout_s=plan.timeout_s) as world:
        backend = backend_of(plan, world)
        workload = workload_named(model)
        loops = {name: _loop(name, workload, plan, world, backend) for name in runtimes(plan, world.size)}
        times = _take_turns(loops, plan, world)
        for loop in loops.values():
            loop.close()
        del loops
        # DDP must be gone before its process group: see the peer ddp.
        gc.collect()
        told = world.gather_json("times", times)
    return None if told is None else {name: [one[name] for one in told] for name in times}


def backend_of(plan: IterationPlan, world: World) -> str:
    """Ours is called by where averages happen, torch's by its library."""
    asked = "cpu" if plan.backend == "gloo" else plan.backend
    return choose_backend(asked, world.specs, hosts=world.hosts).backend


def _loop(name: str, workload: Workload, plan: IterationPlan, world: World, backend: str) -> IterationLoop:
    """Every rank makes the loops in the same order: their groups are collective."""
    batch = workload.batch(plan.batch_size, plan.image_size, world.device)
    if name in (PLAIN, DDP):
        replica = make_replica(workload, plan, world=world)
        model = replica.model if name == PLAIN else ddp_model(replica, plan, world=world, backend=backend)
        return TorchLoop(model, replica, batch, Throttle(world.spec.speed))
    replica = make_replica(workload, plan, world=world, policy=name, execution=plan.execution)
    return OutriderLoop(replica, batch, world=world, backend=backend, name=name)


def _take_turns(loops: Mapping[str, IterationLoop], plan: IterationPlan, world: World) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        if plan.warmup:
            loop.run(plan.warmup)
    for block in range(-(-plan.iterations // BLOCK)):
        for name in first_at(block, list(loops)):
            world.barrier("the next block of iterations")
            times[name] += _block(loops[name], name, plan, block)
    return times


def _block(loop: IterationLoop, name: str, plan: IterationPlan, block: int) -> list[float]:
    """Drop the first iteration of a block, which has cold caches."""
    if name in (PLAIN, DDP, *SHARED_STEP_POLICIES):
        return loop.run(1 + min(BLOCK, plan.iterations - block * BLOCK))[1:]
    # Windows would be cut short by blocks: all of them in one.
    return loop.run(plan.iterations_of(name)) if block == 0 else []
