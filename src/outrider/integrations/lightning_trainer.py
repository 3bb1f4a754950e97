"""The strategy for `lightning.pytorch.Trainer`: a Trainer that trains on devices of unequal speed.

Decides what happens at each call that a Trainer makes of its strategy. The session takes the steps, `TrainerEpochs`
divides epochs into passes, `DividedLoader` divides evaluation data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.connectors.data_connector import _update_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader

from outrider.api.options import SessionOptions
from outrider.api.session_hooks import SessionHooks
from outrider.errors import ConfigError
from outrider.integrations.lightning_answers import RankAnswers
from outrider.integrations.lightning_epochs import LeasedLoader, TrainerEpochs
from outrider.integrations.lightning_evaluation import DividedLoader
from outrider.integrations.lightning_launch import RankLauncher
from outrider.integrations.lightning_ranks import LightningRanks
from outrider.integrations.lightning_schedules import follow_world, let_go


class OutriderStrategy(RankAnswers, Strategy):
    """`Trainer(strategy=OutriderStrategy(devices="cuda:0,cpu"))`; takes the options of `outrider.Session`.

    The policy is `balanced` unless given: every step is that of one device, divided by speed.
    """

    strategy_name = "outrider"

    def __init__(self, **options: Unpack[SessionOptions]) -> None:
        super().__init__()
        self._ranks = LightningRanks(dict(options))
        self._epochs: TrainerEpochs | None = None

    # Ranks

    def _configure_launcher(self) -> None:
        self._ranks.start(self.parallel_devices)
        self._launcher = RankLauncher(self._ranks)

    @property
    def is_distributed(self) -> bool:
        """Whether `self.log(..., sync_dist=True)` has others to ask."""
        return self.world_size > 1

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._ranks.reduce(tensor, reduce_op)

    # Set-up

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: pl.Trainer) -> None:
        _refuse(trainer)
        if hasattr(self.precision_plugin, "device"):
            self.precision_plugin.device = self.root_device.type
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        session, scaler = self._ranks.opened, getattr(self.precision_plugin, "scaler", None)
        for optimizer in self.optimizers:
            _refuse_closures(optimizer)
        session.prepare(self.lightning_module, *self.optimizers, *([scaler] if scaler is not None else []))
        epochs = self._epochs_of(trainer)
        if not self._ranks.takes_same_steps:
            _refuse_per_step(trainer, self._ranks.policy.name)
            epochs.schedule_steps = follow_world(self.lr_scheduler_configs, self.lightning_module, epochs)
        # Ranks take unequal numbers of batches, so none may wait for a message at each; the session stops all of them.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def _epochs_of(self, trainer: pl.Trainer) -> TrainerEpochs:
        if self._epochs is None:
            self._epochs = TrainerEpochs(trainer, self._ranks)
            self._ranks.before_meeting = self._epochs.before_meeting
        return self._epochs

    def process_dataloader(self, dataloader: object) -> Any:
        """Training batches are leased, evaluation batches divided: Lightning inserts no DistributedSampler."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not isinstance(dataloader, DataLoader):
            raise ConfigError(
                f"a loader of type {type(dataloader).__name__}: the ranks cannot share its batches",
                hint="return a torch DataLoader from train_dataloader() and val_dataloader()",
            )
        if trainer.training:
            leased = LeasedLoader(dataloader, self._ranks)
            leased.epochs = self._epochs_of(trainer)
            return leased
        if self.world_size == 1:
            return dataloader
        if trainer.predicting:
            sampler = UnrepeatedDistributedSamplerWrapper(
                dataloader.sampler, num_replicas=self.world_size, rank=self.global_rank, shuffle=False
            )
            return _update_dataloader(dataloader, sampler, mode=RunningStage.PREDICTING)
        return DividedLoader(dataloader, self._ranks)

    # Steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._ranks.opened.batch_samples == 0:
            # This rank has no part in the batch and computes on other samples for company: they count in no mean.
            assert self.lightning_module is not None
            self.lightning_module.trainer._results.batch_size = 0

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        if args or kwargs or is_overridden("backward", module):
            # Such gradients are averaged at the optimizer's step, after they were clipped.
            later: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            SessionHooks(self._ranks.opened).saw_loss(closure_loss)
            return later
        self.pre_backward(closure_loss)
        self._ranks.opened.backward(plugin.pre_backward(closure_loss, module))
        detached: Tensor = plugin.post_backward(closure_loss, module)
        self.post_backward(detached)
        return detached

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The closure first, then the step: an optimizer that called the closure would step before the average."""
        assert self._epochs is not None
        self._epochs.before_step(is_first=_own(optimizer) is self.optimizers[0])
        module = model or self.lightning_module
        if getattr(self.precision_plugin, "scaler", None) is not None:
            return super().optimizer_step(optimizer, closure, module, **kwargs)
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        is_skipped = result is None and getattr(module, "automatic_optimization", True)
        if not is_skipped:
            _own(optimizer).step(**kwargs)
        return result

    # The end

    def teardown(self) -> None:
        if self._epochs is not None and self._ranks.session is not None:
            self._epochs.leave()
        let_go(self.lr_scheduler_configs)
        self._epochs = None
        self._ranks.before_meeting = lambda what: None
        # Before the module moves away from the device on which the ranks share it.
        self._ranks.close()
        super().teardown()


def _own(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer  # type: ignore[no-any-return]


def _refuse(trainer: pl.Trainer) -> None:
    connector = trainer._accelerator_connector
    if connector._layer_sync is not None:
        raise ConfigError(
            "sync_batchnorm=True computes statistics over ranks in every forward pass, and ranks have unequal parts of "
            "a batch",
            hint="leave it out: running statistics are averaged, as for a mixture",
        )
    if trainer.num_nodes > 1 and trainer.world_size == 1:
        raise ConfigError(
            f"num_nodes={trainer.num_nodes}, but this is the only rank",
            hint="start the ranks of all hosts with torchrun or srun",
        )


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS calls its closure several times in a step, with gradients that nobody would average",
            hint="use an optimizer that steps once per batch",
        )


def _refuse_per_step(trainer: pl.Trainer, policy: str) -> None:
    """Callbacks that do something at certain steps of the run; ranks come to them at different times, or never."""
    for callback in trainer.callbacks:
        saves = getattr(callback, "_every_n_train_steps", 0) or getattr(callback, "_train_time_interval", None)
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and saves:
            raise ConfigError(
                f"ModelCheckpoint(every_n_train_steps=..., train_time_interval=...): with policy {policy!r} ranks are "
                "at different steps in the middle of an epoch",
                hint='use every_n_epochs=, or policy="balanced" or "sync"',
            )
        if isinstance(callback, pl.callbacks.WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} averages the weights of each rank's own steps: with policy {policy!r} "
                "ranks take different ones",
                hint='pass policy="balanced" or "sync"; StochasticWeightAveraging, once per epoch, works with all',
            )
