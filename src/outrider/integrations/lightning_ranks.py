"""The ranks of a run as Lightning asks for them: place, devices, launch, and what ranks tell each other.

Decides when ranks are started and how long the session lives: as long as one call of the Trainer, or as the program of
Fabric. Both strategies of `outrider.integrations.lightning` own one `LightningRanks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from outrider.api.joining import find_link
from outrider.api.options import make_session_order
from outrider.api.session import Session, framework_session
from outrider.errors import ConfigError
from outrider.integrations.plain_values import as_told, from_told
from outrider.policy.policy_spec import PolicySpec
from outrider.world.messages import Link

DEFAULT_POLICY = "balanced"
"""Lightning counts steps and logs as if all ranks took every step; with this policy they do, on unequal devices too."""
_OURS_TO_KEEP = {
    "resume": "pass ckpt_path= to trainer.fit(), or load with fabric.load()",
    "checkpoint_every": "use the ModelCheckpoint callback, or fabric.save()",
    "keep": "use save_top_k= of the ModelCheckpoint callback",
}


class LightningRanks:
    """This process as a rank: known when the Trainer or Fabric is made; the session is open while it works."""

    def __init__(self, options: dict[str, Any]) -> None:
        for name, way_out in _OURS_TO_KEEP.items():
            if name in options:
                raise ConfigError(f"{name} was given, but Lightning saves and loads its own checkpoints", hint=way_out)
        self.options = dict(options)
        self.session: Session | None = None
        self._link: Link | None = None
        self._group: dist.ProcessGroup | None = None
        self._order = make_session_order({"policy": DEFAULT_POLICY, **self.options})
        self._num_keys = 0
        self.before_meeting: Callable[[str], None] = lambda what: None
        """Called before all ranks meet; raises where they cannot."""
        if self.policy.switches:
            raise ConfigError(
                f"policy={self.policy.name!r} changes between exact and local steps while it runs, and Lightning must "
                "know from the start whether all ranks take the same steps",
                hint=f'pass policy="{DEFAULT_POLICY}" (exact steps), "cadence" or "async" (local steps)',
            )

    @property
    def policy(self) -> PolicySpec:
        return self._order.recipe.policy_spec

    @property
    def seed(self) -> int:
        return self._order.recipe.seed

    @property
    def takes_same_steps(self) -> bool:
        """Whether all ranks take the same number of steps, as Lightning assumes."""
        return self.policy.shares_steps or self.world_size == 1

    # Starting

    def start(self, devices: Sequence[torch.device] | None) -> None:
        """Find the place of this process; one that only starts the ranks exits here with their exit code.

        `devices` are Lightning's, from Trainer(devices=) or Fabric(devices=); those of the strategy come first.
        """
        if "devices" not in self.options and devices and not (len(devices) == 1 and "WORLD_SIZE" in os.environ):
            self.options["devices"] = [str(device) for device in devices]
        seed = os.environ.get("PL_GLOBAL_SEED")
        if seed is not None:
            self.options.setdefault("seed", int(seed))
        self._order = make_session_order({"policy": DEFAULT_POLICY, **self.options})
        self._link = find_link(self._order)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.rank

    @property
    def link(self) -> Link:
        assert self._link is not None, "Lightning connects a strategy before it asks for ranks"
        return self._link

    @property
    def rank(self) -> int:
        return self.link.environment.rank if self._link else 0

    @property
    def local_rank(self) -> int:
        return self.link.environment.local_rank if self._link else 0

    @property
    def node_rank(self) -> int:
        return self.rank // self.link.environment.local_world_size if self._link else 0

    @property
    def world_size(self) -> int:
        return self.link.environment.world_size if self._link else 1

    @property
    def device(self) -> torch.device:
        return torch.device(self.link.spec.torch_name if self._link else "cpu")

    def open(self) -> Session:
        """Open a session, in which all ranks meet."""
        if self.session is None:
            self.session = framework_session(self.options, policy=DEFAULT_POLICY).open()
            self._group = self.session.world.group_for("cpu") if self.world_size > 1 else None
        return self.session

    def close(self, error: BaseException | None = None) -> None:
        session, self.session, self._group = self.session, None, None
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)

    @property
    def opened(self) -> Session:
        if self.session is None:
            raise ConfigError(
                "the ranks meet only while the Trainer works, or after fabric.launch()",
                hint="call fabric.launch() first; with a Trainer, do it in a hook of the module or of a callback",
            )
        return self.session

    def next_key(self) -> str:
        """The name of the next ledger; all ranks open the same ones in the same order."""
        self._num_keys += 1
        return f"lightning/{self._num_keys}"

    # What ranks tell each other: all of them call these, in the same order

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; without a session nothing, as `trainer.save_checkpoint` does after fit."""
        if self.session is not None and self.world_size > 1:
            self.before_meeting(f"barrier({name or ''})")
            self.session.world.barrier(name or "barrier() of Lightning")

    def reduce(self, tensor: Any, op: Any = "mean") -> Any:
        """The mean or the sum over ranks."""
        group = self._meet("a value that is reduced over ranks (sync_dist=True)")
        if not isinstance(tensor, Tensor) or group is None:
            return tensor
        name = "mean" if op in (None, "avg", "mean") else str(op).rsplit(".", 1)[-1].lower()
        ops = {"mean": dist.ReduceOp.SUM, **{one: getattr(dist.ReduceOp, one.upper()) for one in ("sum", "max", "min")}}
        if name not in ops:
            raise ConfigError(
                f"values can be reduced with mean, sum, max and min, got {op!r}", hint="pass one of these"
            )
        # Gloo carries tensors of the host; a mean of integers would be cut.
        total = tensor.detach().to("cpu", torch.float64 if name == "mean" else tensor.dtype, copy=True)
        dist.all_reduce(total, op=ops[name], group=group)
        total = total / self.world_size if name == "mean" else total
        return total.to(tensor.device, tensor.dtype if tensor.is_floating_point() or name != "mean" else torch.float32)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked; without gradients."""
        if sync_grads:
            raise ConfigError(
                "all_gather(sync_grads=True) sends gradients between ranks, which have unequal parts of a batch",
                hint="leave sync_grads out; a loss over the samples of all ranks needs Lightning's own DDP strategy",
            )
        group = self._meet("all_gather()")
        if group is None:
            return tensor
        mine = tensor.detach().cpu().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=group)
        return torch.stack(parts).to(tensor.device)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """A value of one rank on all of them."""
        if self._meet("broadcast()") is None:
            return value
        world = self.opened.world
        own = as_told(value) if world.rank == source else None
        return from_told(world.exchange_json(own, name="broadcasts", what="a broadcast of Lightning")[source])

    def decide(self, decision: bool, *, all: bool) -> bool:
        """Whether all ranks, or any of them, say yes."""
        total = self.reduce(torch.tensor(int(decision)), "sum")
        return bool(total == self.world_size) if all else bool(total > 0)

    def _meet(self, what: str) -> dist.ProcessGroup | None:
        if self.world_size == 1:
            return None
        session = self.opened
        self.before_meeting(what)
        if not self.takes_same_steps:
            # A rank that waits elsewhere is noticed here, and only here: Gloo would wait until its timeout.
            session.world.barrier(what)
        return self._group
