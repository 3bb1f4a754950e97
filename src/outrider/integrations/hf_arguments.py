"""Makes a rank of a session out of `TrainingArguments` and of accelerate's state.

Decides which arguments of the Trainer are refused, and what accelerate believes: that this is one process on this
rank's device, so that it wraps, shards and gathers nothing. Used by `outrider.integrations.huggingface`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments
from transformers.utils import logging

from outrider.api.session import Session, open_session
from outrider.api.session_hooks import SessionHooks
from outrider.errors import ConfigError
from outrider.launch.script_launcher import at_script_end, script_rank
from outrider.world.default_group import end_default_group

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


class RankState:
    """What `TrainingArguments` asks about the ranks; other questions go to accelerate's state of one process."""

    def __init__(self, session: Session, *, local_rank: int) -> None:
        self.num_processes = session.world_size
        self.process_index = session.rank
        self.local_process_index = local_rank
        self.device = session.device
        # Otherwise the Trainer wraps the model in DistributedDataParallel.
        self.distributed_type = DistributedType.NO

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    def __getattr__(self, name: str) -> Any:
        return getattr(PartialState(), name)


def join(args: TrainingArguments, options: Mapping[str, Any]) -> tuple[Session, bool]:
    """The session of this process, and whether it was opened here; ranks are started if there are none yet."""
    session = open_session()
    if dist.is_initialized() and script_rank() is not None:
        # TrainingArguments makes a group where it finds ranks, and nobody would end it.
        at_script_end(end_default_group)
    if session is None:
        return Session(**{"seed": args.seed, **options}).open(), True
    if options:
        raise ConfigError(
            f"session_options was given ({', '.join(options)}), but a session is open already",
            hint="pass these options to that outrider.Session, or let the Trainer open one",
        )
    return session, False


def settle_in(args: TrainingArguments, session: Session) -> None:
    """Make the arguments those of this rank, and accelerate's state that of one process on its device."""
    local_rank = SessionHooks(session).local_rank
    become_one_process(session, local_rank=local_rank)
    args.__dict__["_setup_devices"] = session.device
    args.distributed_state = RankState(session, local_rank=local_rank)
    # More than one would be torch's DataParallel over all GPUs of this process.
    args._n_gpu = 0 if session.device.type == "cpu" else 1


def become_one_process(session: Session, *, local_rank: int) -> PartialState:
    """accelerate's state: one process, which is the main one on rank 0 only."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with without_ranks():
        state = PartialState(cpu=session.device.type == "cpu")
    state.device = session.device
    if session.device.type == "cuda":
        torch.cuda.set_device(session.device)
    state.process_index, state.local_process_index = session.rank, local_rank
    return state


@contextmanager
def without_ranks() -> Iterator[None]:
    """Hide the variables from which accelerate concludes that it has to distribute."""
    hidden = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


_LAYERWISE = ("lomo", "adalomo")
_DDP_TIMEOUT_S = 1800
"""What TrainingArguments has unless it is given."""


def tell_of_gathers(accelerator: Any, *, name: str, is_in_forward: Callable[[], bool]) -> None:
    """Say once that what a subclass of the Trainer gathers by itself in forward and backward is its own rank's.

    Ranks have parts of unequal size, also none, and with local steps different numbers of steps: they do not meet.
    """
    gather = accelerator.gather

    def told(tensor: Any) -> Any:
        if is_in_forward():
            logging.get_logger(__name__).warning_once(
                f"{name} gathers numbers of its own in its steps: those that it logs are of rank 0's part of the data. "
                "The losses of training and evaluation, the rate and compute_metrics are of all ranks."
            )
        return gather(tensor)

    accelerator.gather = told


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise for every argument that a session cannot honour."""
    for name, (is_given, way_out) in (_dividing(args) | _of_ddp(args)).items():
        if is_given:
            raise ConfigError(f"TrainingArguments.{name} does not work in an outrider session", hint=way_out)


def refuse_device(args: TrainingArguments, session: Session) -> None:
    """Raise if the arguments want another device than the session has."""
    if args.use_cpu and session.device.type != "cpu":
        raise ConfigError(
            f"TrainingArguments.use_cpu was given, but rank {session.rank} trains on {session.device}",
            hint="leave use_cpu out: the devices of the session decide",
        )


def _dividing(args: TrainingArguments) -> dict[str, tuple[Any, str]]:
    """Arguments that divide a model, a batch or a step in a way of their own."""
    config, optimizer = args.accelerator_config, str(getattr(args.optim, "value", args.optim))
    whole_model = "it divides the model among processes, and every rank of a session has all of it; leave it out"
    return {
        "deepspeed": (args.deepspeed, whole_model),
        "fsdp": (args.fsdp, whole_model),
        "parallelism_config": (args.parallelism_config, whole_model),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "ranks would find different sizes; pass per_device_train_batch_size",
        ),
        "optim": (
            optimizer in _LAYERWISE or "layerwise" in optimizer,
            "it steps during the backward pass, before gradients are averaged; choose an optimizer that steps after it",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            args.train_sampling_strategy == "batch_rebalance",
            "it makes equal parts for equal devices; the session divides by speed: use 'random' or 'group_by_length'",
        ),
        "enable_jit_checkpoint": (
            args.enable_jit_checkpoint,
            "the session itself writes a checkpoint of all ranks after SIGTERM; leave it out",
        ),
        "accelerator_config.split_batches": (
            config.split_batches,
            'the policy divides batches: use policy="balanced", which splits each by speed',
        ),
        "accelerator_config.dispatch_batches": (
            config.dispatch_batches,
            "every rank reads its own samples; leave it out",
        ),
        "accelerator_config.gradient_accumulation_kwargs['sync_each_batch']": (
            (config.gradient_accumulation_kwargs or {}).get("sync_each_batch"),
            "gradients are averaged once per step, whatever the accumulation; leave it out",
        ),
    }


def _of_ddp(args: TrainingArguments) -> dict[str, tuple[Any, str]]:
    """Wishes to DistributedDataParallel that have another name here; the other ones are about its inner workings."""
    return {
        "ddp_backend": (args.ddp_backend, 'pass session_options={"backend": ...}'),
        "ddp_timeout": (args.ddp_timeout != _DDP_TIMEOUT_S, 'pass session_options={"timeout_s": ...}'),
        "ddp_broadcast_buffers": (
            args.ddp_broadcast_buffers,
            "buffers are averaged over ranks, and are not those of rank 0; leave it out",
        ),
    }
