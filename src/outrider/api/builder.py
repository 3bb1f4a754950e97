"""The fluent form of `train()`: `Ddp.builder(model, optimizer, step).dataset(ds).batch_size(64).run().join()`.

Decides nothing: each method sets the option of its name, `run()` hands all of them to `train()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, NoReturn

from outrider.api.handle import Run
from outrider.api.options import make_order
from outrider.api.train import start
from outrider.average.outer import Outer
from outrider.data.augmented_feed import AugmentFunction
from outrider.errors import ConfigError, nearest
from outrider.replica.recipe import EvaluateFunction, ModelSource, OptimizerFactory, SchedulerFactory, StepFunction
from outrider.runtime.context import EpochContext


class Ddp:
    """Entry of the fluent form."""

    @staticmethod
    def builder(model: ModelSource, optimizer: OptimizerFactory, step: StepFunction) -> DdpBuilder:
        return DdpBuilder({"model": model, "optimizer": optimizer, "step": step}, {})


class DdpBuilder:
    """Options so far; every method returns a new builder, so a half-built one can be shared."""

    def __init__(self, required: dict[str, Any], options: dict[str, Any]) -> None:
        self._required = required
        self._options = options

    def _with(self, name: str, value: Any) -> DdpBuilder:
        return DdpBuilder(self._required, {**self._options, name: value})

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        close = nearest(name, [method for method in vars(DdpBuilder) if not method.startswith("_")])
        raise ConfigError(
            f"unknown option {name!r}", hint=f"did you mean .{close}(...)?" if close else "see outrider.train"
        )

    def run(self) -> Run:
        """Start the run; returns at once with its handle."""
        if "dataset" not in self._required:
            raise ConfigError("dataset is missing", hint="call .dataset(train_set) before .run()")
        return start(make_order(self._required, self._options))

    def dataset(self, dataset: Any) -> DdpBuilder:
        """The training data: a map-style data set, tensors, or a function that makes one."""
        return DdpBuilder({**self._required, "dataset": dataset}, self._options)

    def evaluate(self, function: EvaluateFunction) -> DdpBuilder:
        """Evaluate `eval_dataset` after every epoch: `function(model, batch)` gives the mean over the batch."""
        return self._with("evaluate", function)

    def eval_dataset(self, dataset: Any) -> DdpBuilder:
        """The data that `evaluate` sees."""
        return self._with("eval_dataset", dataset)

    def num_epochs(self, number: int) -> DdpBuilder:
        """Passes over the data set."""
        return self._with("epochs", number)

    def batch_size(self, size: int) -> DdpBuilder:
        """Samples of a step: per rank, for `balanced` of the whole world."""
        return self._with("batch_size", size)

    def epochs(self, number: int) -> DdpBuilder:
        """Passes over the data set."""
        return self._with("epochs", number)

    def policy(self, name: Literal["sync", "balanced", "cadence", "async", "independent"]) -> DdpBuilder:
        """How ranks work together."""
        return self._with("policy", name)

    def backend(self, name: Literal["auto", "cpu", "nccl"]) -> DdpBuilder:
        """How averages travel."""
        return self._with("backend", name)

    def devices(self, names: str | Sequence[str]) -> DdpBuilder:
        """One rank each, such as `cuda:0,cpu` or `cpu,cpu@0.4`."""
        return self._with("devices", names)

    def anchor(self, batches: int) -> DdpBuilder:
        """Fix the batches of the slowest rank between averages."""
        return self._with("anchor", batches)

    def min_anchor(self, batches: int) -> DdpBuilder:
        """Lower bound of the tuned anchor."""
        return self._with("min_anchor", batches)

    def max_anchor(self, batches: int) -> DdpBuilder:
        """Upper bound of the tuned anchor."""
        return self._with("max_anchor", batches)

    def overhead_target(self, fraction: float) -> DdpBuilder:
        """Part of the time that averaging may take."""
        return self._with("overhead_target", fraction)

    def drift_threshold(self, drift: float) -> DdpBuilder:
        """Drift above which the guard shortens windows."""
        return self._with("drift_threshold", drift)

    def guard(self, is_on: bool) -> DdpBuilder:
        """Watch the drift, or do not."""
        return self._with("guard", is_on)

    def max_batch_diff(self, batches: int) -> DdpBuilder:
        """Bound of the lead over the slowest rank in a window."""
        return self._with("max_batch_diff", batches)

    def max_overshoot(self, batches: int) -> DdpBuilder:
        """Batches a rank may go beyond its plan while an average is late."""
        return self._with("max_overshoot", batches)

    def shares(self, fractions: Sequence[float]) -> DdpBuilder:
        """Fix each rank's part of the work."""
        return self._with("shares", fractions)

    def speed_hints(self, speeds: Sequence[float]) -> DdpBuilder:
        """Relative speeds to start from."""
        return self._with("speed_hints", speeds)

    def max_grad_norm(self, norm: float) -> DdpBuilder:
        """Clip each rank's gradient."""
        return self._with("max_grad_norm", norm)

    def accumulate(self, pieces: int) -> DdpBuilder:
        """Compute each batch in this many pieces to save memory."""
        return self._with("accumulate", pieces)

    def precision(self, name: Literal["fp32", "bf16"]) -> DdpBuilder:
        """Precision of forward and backward."""
        return self._with("precision", name)

    def execution(self, name: Literal["auto", "eager", "compile", "graph"]) -> DdpBuilder:
        """How steps run."""
        return self._with("execution", name)

    def memory_format(self, name: Literal["auto", "channels_last", "contiguous"]) -> DdpBuilder:
        """How the weights of convolutions lie in memory."""
        return self._with("memory_format", name)

    def fused_optimizer(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """One kernel for all parameters."""
        return self._with("fused_optimizer", is_on)

    def tf32(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """Shorter mantissas in fp32 products."""
        return self._with("tf32", is_on)

    def scheduler(self, factory: SchedulerFactory) -> DdpBuilder:
        """Learning-rate schedule, advanced by samples of the whole world."""
        return self._with("scheduler", factory)

    def augment(self, function: AugmentFunction) -> DdpBuilder:
        """Change training batches on the device: `function(batch, keys)`, keyed by seed, epoch and sample."""
        return self._with("augment", function)

    def lr_scale(self, factor: float | Literal["auto"]) -> DdpBuilder:
        """Multiply the optimizer's learning rate."""
        return self._with("lr_scale", factor)

    def average_optimizer(self, is_on: bool) -> DdpBuilder:
        """Average the optimizer's state too."""
        return self._with("average_optimizer", is_on)

    def outer(self, optimizer: Literal["auto", "none", "nesterov", "slowmo"] | Outer) -> DdpBuilder:
        """Step taken on the averaged displacement."""
        return self._with("outer", optimizer)

    def seed(self, number: int) -> DdpBuilder:
        """Seed of parameters, order and augmentation."""
        return self._with("seed", number)

    def epoch_start(self, callback: Callable[[EpochContext], None]) -> DdpBuilder:
        """Called on every rank before an epoch."""
        return self._with("epoch_start", callback)

    def epoch_end(self, callback: Callable[[EpochContext], None]) -> DdpBuilder:
        """Called on every rank after an epoch."""
        return self._with("epoch_end", callback)

    def checkpoint_every(self, epochs: float) -> DdpBuilder:
        """Epochs between checkpoints."""
        return self._with("checkpoint_every", epochs)

    def resume(self, folder: str | PathLike[str]) -> DdpBuilder:
        """Go on from a run folder or a checkpoint."""
        return self._with("resume", folder)

    def verify(self, is_on: bool) -> DdpBuilder:
        """Check every average to the bit."""
        return self._with("verify", is_on)

    def run_dir(self, folder: str | PathLike[str]) -> DdpBuilder:
        """Where the run leaves its files."""
        return self._with("run_dir", folder)

    def workers(self, number: int) -> DdpBuilder:
        """Data loading processes per rank."""
        return self._with("workers", number)

    def collate(self, function: Callable[[list[Any]], Any]) -> DdpBuilder:
        """Make a batch of samples."""
        return self._with("collate", function)

    def resident(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """Keep the data on the device."""
        return self._with("resident", is_on)

    def shuffle(self, is_on: bool) -> DdpBuilder:
        """Draw a new order each epoch."""
        return self._with("shuffle", is_on)

    def threads_per_rank(self, number: int) -> DdpBuilder:
        """Threads of each rank."""
        return self._with("threads_per_rank", number)

    def port(self, number: int) -> DdpBuilder:
        """Port of the store on loopback."""
        return self._with("port", number)

    def timeout_s(self, seconds: float) -> DdpBuilder:
        """How long a rank waits for the others."""
        return self._with("timeout_s", seconds)

    def record_schedule(self, is_on: bool) -> DdpBuilder:
        """Write `schedule.json`: every step and average, as the lab can replay them."""
        return self._with("record_schedule", is_on)

    def sample_utilization(self, is_on: bool) -> DdpBuilder:
        """Sample how busy the devices are, ten times a second; on unless switched off."""
        return self._with("sample_utilization", is_on)
