"""The strategy for `lightning.fabric.Fabric`: the user's own loop, with Fabric's calls.

Decides what a loader of Fabric is used for, which Fabric does not say: training, or evaluation. Models and optimizers
are prepared at the first training batch, because Fabric takes them one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from outrider.api.options import SessionOptions
from outrider.api.session_hooks import SessionHooks
from outrider.errors import ConfigError
from outrider.integrations.lightning_answers import RankAnswers
from outrider.integrations.lightning_evaluation import DividedLoader
from outrider.integrations.lightning_launch import FabricLauncher
from outrider.integrations.lightning_ranks import LightningRanks


class OutriderFabricStrategy(RankAnswers, Strategy):
    """`Fabric(strategy=OutriderFabricStrategy(devices="cuda:0,cpu"))`; takes the options of `outrider.Session`.

    The policy is `balanced` unless given: every step is that of one device, divided by speed.
    """

    def __init__(self, **options: Unpack[SessionOptions]) -> None:
        super().__init__()
        self._ranks = LightningRanks(dict(options))
        self._ranks.before_meeting = self._before_meeting
        self._backward_sync_control = _NothingToBlock()
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._is_prepared = self._is_in_pass = self._is_left = False
        self._num_calls = 0
        """Of backward and of optimizers, in this pass."""

    # Ranks

    def _configure_launcher(self) -> None:
        self._ranks.start(self.parallel_devices)
        self._launcher = FabricLauncher(self._ranks)

    def all_reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._ranks.reduce(tensor, reduce_op)

    def close(self) -> None:
        """End the session and write its record, in a notebook; at the end of a script this happens by itself."""
        self._ranks.close()

    # Models

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        self._refuse_late()
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._refuse_late()
        self._optimizers.append(optimizer)
        return optimizer

    def _refuse_late(self) -> None:
        if self._is_prepared:
            raise ConfigError(
                "fabric.setup() was called after the first training batch, and the ranks share the models of then",
                hint="set up all models and optimizers before the loop",
            )

    def _prepare(self) -> None:
        if not self._is_prepared:
            if hasattr(self.precision, "device"):
                self.precision.device = self.root_device.type
            scaler = getattr(self.precision, "scaler", None)
            extra = [scaler] if scaler is not None else []
            self._ranks.opened.prepare(*self._modules, *self._optimizers, *extra)
            self._is_prepared = True

    # Data

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        return FabricLoader(dataloader, self)

    def is_training(self) -> bool:
        """Whether a loop that begins now trains: with gradients, and with a model in training mode."""
        return torch.is_grad_enabled() and any(module.training for module in self._modules)

    def num_steps(self, loader: DataLoader[Any]) -> int:
        num_batches = len(self._ranks.opened.batches(loader))
        return -(-num_batches // (self.world_size if self._ranks.policy.joins_batches else 1))

    def evaluation_batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return iter(loader if self.world_size == 1 else DividedLoader(loader, self._ranks))

    def training_batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """One pass: an epoch of the session."""
        self._prepare()
        session = self._ranks.opened
        self._num_calls, self._is_in_pass, self._is_left = 0, True, True
        try:
            yield from session.batches(loader)
            self._is_left = False
        finally:
            self._is_in_pass = False
        if not self._num_calls:
            raise ConfigError(
                "a loop over a loader had the model in training mode and gradients on, but took no step",
                hint="call model.eval(), or use torch.no_grad(), before you iterate over evaluation data",
            )

    def _before_meeting(self, what: str) -> None:
        if self._is_in_pass and not self._ranks.takes_same_steps:
            raise ConfigError(
                f"{what} inside of a training loop waits for all ranks, but with policy {self._ranks.policy.name!r} "
                "they take different numbers of batches",
                hint='do it after the loop, or pass policy="balanced" or "sync"',
            )
        if self._is_left and not self._is_in_pass:
            # The user left the loop; the other ranks end it with their next average.
            self._ranks.opened._settle()
            self._is_left = False

    # Steps

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._num_calls += 1
        if args or kwargs or getattr(self.precision, "scaler", None) is not None:
            super().backward(tensor, module, *args, **kwargs)
            if self._is_in_pass:
                SessionHooks(self._ranks.opened).saw_loss(tensor)
            return
        self.precision.pre_backward(tensor, module)
        self._ranks.opened.backward(tensor)
        self.precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._num_calls += 1
        return super().optimizer_step(optimizer, **kwargs)


class FabricLoader:
    """A loader that was set up: leased batches where the loop trains, divided ones where it evaluates."""

    def __init__(self, loader: DataLoader[Any], strategy: OutriderFabricStrategy) -> None:
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.loader, self._strategy = loader, strategy

    def __len__(self) -> int:
        """Steps of an epoch; of evaluation data, its batches."""
        return self._strategy.num_steps(self.loader)

    def __iter__(self) -> Iterator[Any]:
        strategy = self._strategy
        batches = strategy.training_batches if strategy.is_training() else strategy.evaluation_batches
        return batches(self.loader)


class _NothingToBlock(_BackwardSyncControl):
    """Gradients are averaged when the optimizer steps, so accumulation needs no blocking."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
