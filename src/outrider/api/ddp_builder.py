"""The fluent form of `train()`: `Ddp.builder(model, optimizer, step).dataset(ds).batch_size(64).run().join()`.

Decides nothing: each method sets the option of its name, and `run()` passes all of them to `train()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, NoReturn

from outrider.api.handle import Run
from outrider.api.options import PrecisionName, make_order, overridden
from outrider.api.run_talk import RunTalk
from outrider.api.train import start
from outrider.average.outer import Outer
from outrider.average.transport.backend_table import BackendName, BackendSpec
from outrider.data.augmented_feed import AugmentFunction
from outrider.errors import ConfigError, nearest
from outrider.policy.policies import PolicyName, PolicySpec
from outrider.rank.epoch_context import EpochContext
from outrider.replica.recipe import EvaluateFunction, ModelSource, OptimizerFactory, SchedulerFactory, StepFunction
from outrider.trackers.tracker import Tracker
from outrider.trackers.tracker_names import TrackerName


class Ddp:
    """Entry point of the fluent form."""

    @staticmethod
    def builder(model: ModelSource, optimizer: OptimizerFactory, step: StepFunction) -> DdpBuilder:
        return DdpBuilder({"model": model, "optimizer": optimizer, "step": step}, {})


class DdpBuilder:
    """The options so far. Every method returns a new builder, so an incomplete builder can be reused."""

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
        order = make_order(self._required, overridden(self._options))
        return start(order, talk=RunTalk.open(order.config.quiet))

    def dataset(self, dataset: Any) -> DdpBuilder:
        """The training data: a data set, tensors, a function that returns one of them, or a `DataLoader`."""
        return DdpBuilder({**self._required, "dataset": dataset}, self._options)

    def evaluate(self, function: EvaluateFunction) -> DdpBuilder:
        """Evaluate `eval_dataset` after every epoch: `function(model, batch)` gives the mean over the batch."""
        return self._with("evaluate", function)

    def eval_dataset(self, dataset: Any) -> DdpBuilder:
        """The data for `evaluate`."""
        return self._with("eval_dataset", dataset)

    def num_epochs(self, number: int) -> DdpBuilder:
        """Passes over the data set."""
        return self._with("epochs", number)

    def batch_size(self, size: int | Sequence[int] | Mapping[str, int]) -> DdpBuilder:
        """Samples per step: of each rank, for `auto` and `balanced` of the whole world."""
        return self._with("batch_size", size)

    def epochs(self, number: int) -> DdpBuilder:
        """Passes over the data set."""
        return self._with("epochs", number)

    def steps(self, number: int) -> DdpBuilder:
        """Number of steps of the whole world, `batch_size` samples each, instead of epochs."""
        return self._with("steps", number)

    def samples(self, number: int) -> DdpBuilder:
        """Number of samples of the whole world, instead of epochs."""
        return self._with("samples", number)

    def policy(self, name: PolicyName | PolicySpec) -> DdpBuilder:
        """The policy: when ranks average, and which rank takes which samples."""
        return self._with("policy", name)

    def backend(self, name: BackendName | BackendSpec) -> DdpBuilder:
        """The backend of averages: `nccl`, `cpu` or `auto`."""
        return self._with("backend", name)

    def devices(self, names: str | Sequence[str]) -> DdpBuilder:
        """The devices, one rank on each, such as `cuda:0,cpu` or `cpu,cpu@0.4`."""
        return self._with("devices", names)

    def anchor(self, batches: int) -> DdpBuilder:
        """Fix the number of batches that the slowest rank takes between averages; the guard does not change it."""
        return self._with("anchor", batches)

    def min_anchor(self, batches: int) -> DdpBuilder:
        """Lower bound of the tuned anchor."""
        return self._with("min_anchor", batches)

    def max_anchor(self, batches: int) -> DdpBuilder:
        """Upper bound of the tuned anchor."""
        return self._with("max_anchor", batches)

    def overhead_target(self, fraction: float) -> DdpBuilder:
        """Target for the fraction of time spent on averaging."""
        return self._with("overhead_target", fraction)

    def drift_threshold(self, drift: float) -> DdpBuilder:
        """Drift above which the guard shortens windows."""
        return self._with("drift_threshold", drift)

    def guard(self, is_on: bool) -> DdpBuilder:
        """Whether the guard shortens windows when the drift rises."""
        return self._with("guard", is_on)

    def max_batch_diff(self, batches: int) -> DdpBuilder:
        """Maximum lead in batches over the slowest rank in a window."""
        return self._with("max_batch_diff", batches)

    def max_overshoot(self, batches: int) -> DdpBuilder:
        """Batches that a rank may take beyond its plan while an average is late."""
        return self._with("max_overshoot", batches)

    def shares(self, fractions: Sequence[float]) -> DdpBuilder:
        """Fix each rank's share of the work."""
        return self._with("shares", fractions)

    def speed_hints(self, speeds: Sequence[float]) -> DdpBuilder:
        """Initial relative speeds of the ranks."""
        return self._with("speed_hints", speeds)

    def max_grad_norm(self, norm: float) -> DdpBuilder:
        """Clip the norm of gradients: of the whole batch in shared steps, each rank's own in local steps."""
        return self._with("max_grad_norm", norm)

    def accumulate(self, pieces: int) -> DdpBuilder:
        """Compute each batch in this many micro-batches to save memory."""
        return self._with("accumulate", pieces)

    def micro_batch(self, samples: int | Literal["auto"] | Sequence[int | Literal["auto"]]) -> DdpBuilder:
        """Samples that a rank computes at once: a number, one per rank, or `auto`, as many as fit its memory."""
        return self._with("micro_batch", samples)

    def precision(self, name: PrecisionName | Sequence[PrecisionName]) -> DdpBuilder:
        """Precision of forward and backward: `fp32`, `bf16`, `fp16`, `auto`, or one per rank."""
        return self._with("precision", name)

    def execution(self, name: Literal["auto", "eager", "compile", "graph"]) -> DdpBuilder:
        """How steps run: `auto`, `eager`, `compile` or `graph`."""
        return self._with("execution", name)

    def memory_format(self, name: Literal["auto", "channels_last", "contiguous"]) -> DdpBuilder:
        """Memory format of convolutions: `auto`, `channels_last` or `contiguous`."""
        return self._with("memory_format", name)

    def fused_optimizer(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """Use the fused optimizer kernel: True, False or `auto`."""
        return self._with("fused_optimizer", is_on)

    def tf32(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """Allow TF32 in fp32 products: True, False or `auto`."""
        return self._with("tf32", is_on)

    def scheduler(self, factory: SchedulerFactory) -> DdpBuilder:
        """Learning-rate schedule, advanced by samples of the whole world."""
        return self._with("scheduler", factory)

    def augment(self, function: AugmentFunction) -> DdpBuilder:
        """Change training batches on the device: `function(batch, keys)`, keyed by seed, epoch and sample."""
        return self._with("augment", function)

    def lr_scale(self, factor: float | Literal["auto"]) -> DdpBuilder:
        """Multiply the learning rate; `auto` scales Adam's by the effective number of ranks."""
        return self._with("lr_scale", factor)

    def average_optimizer(self, is_on: bool) -> DdpBuilder:
        """Average the optimizer state too."""
        return self._with("average_optimizer", is_on)

    def wire(self, form: Literal["fp32", "bf16", "int8"]) -> DdpBuilder:
        """How averages send what parameters have moved: `fp32`, `bf16`, or `int8` with error feedback."""
        return self._with("wire", form)

    def outer(self, optimizer: Literal["auto", "none", "nesterov", "slowmo"] | Outer) -> DdpBuilder:
        """The outer step on the averaged displacement: `auto`, `none`, `nesterov`, `slowmo` or an `Outer`."""
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

    def checkpoint_every(self, distance: float | str | None) -> DdpBuilder:
        """Epochs between checkpoints, a time such as "10min", or None for never."""
        return self._with("checkpoint_every", distance)

    def keep(self, checkpoints: int) -> DdpBuilder:
        """Number of checkpoints to keep; older ones are removed."""
        return self._with("keep", checkpoints)

    def resume(self, folder: str | PathLike[str]) -> DdpBuilder:
        """Continue from a run folder or a checkpoint; "auto": from the newest of run_dir, if there is one."""
        return self._with("resume", folder)

    def verify(self, is_on: bool) -> DdpBuilder:
        """Check every average to the bit."""
        return self._with("verify", is_on)

    def run_dir(self, folder: str | PathLike[str]) -> DdpBuilder:
        """Folder for the files of the run."""
        return self._with("run_dir", folder)

    def workers(self, number: int) -> DdpBuilder:
        """Data loading processes per rank."""
        return self._with("workers", number)

    def collate(self, function: Callable[[list[Any]], Any]) -> DdpBuilder:
        """Function that collates samples into a batch."""
        return self._with("collate", function)

    def resident(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """Keep the data on the device: True, False or `auto`."""
        return self._with("resident", is_on)

    def shuffle(self, is_on: bool) -> DdpBuilder:
        """Shuffle the samples anew in each epoch."""
        return self._with("shuffle", is_on)

    def order(self, order: Callable[[int], Any] | Iterable[int]) -> DdpBuilder:
        """The samples of an epoch in their order: a function from the epoch to indices, or a sampler."""
        return self._with("order", order)

    def length(self, samples: int) -> DdpBuilder:
        """Samples of an epoch of an iterable data set, where it has no `__len__`."""
        return self._with("length", samples)

    def drop_last(self, is_on: bool) -> DdpBuilder:
        """Drop the last samples of each epoch that do not fill a batch."""
        return self._with("drop_last", is_on)

    def environments(self, wanted: str | Sequence[str] | Mapping[str, str]) -> DdpBuilder:
        """Python environments of the ranks, for cards that need other torch builds; the program's own by default."""
        return self._with("environments", wanted)

    def threads_per_rank(self, number: int) -> DdpBuilder:
        """Threads of each rank."""
        return self._with("threads_per_rank", number)

    def port(self, number: int) -> DdpBuilder:
        """`MASTER_PORT` of the ranks, for process groups that your own code opens; a free one by default."""
        return self._with("port", number)

    def timeout_s(self, seconds: float) -> DdpBuilder:
        """How long a rank waits for the others, in seconds."""
        return self._with("timeout_s", seconds)

    def grace_s(self, seconds: float) -> DdpBuilder:
        """How long ranks may take for an orderly stop after SIGTERM or Ctrl-C, in seconds."""
        return self._with("grace_s", seconds)

    def record_schedule(self, is_on: bool) -> DdpBuilder:
        """Write `schedule.json` with every step and average, for `outrider replay`."""
        return self._with("record_schedule", is_on)

    def trackers(self, trackers: TrackerName | Tracker | Sequence[TrackerName | Tracker]) -> DdpBuilder:
        """Where rank 0 also writes the values of every epoch: "csv", "tensorboard", "wandb", "trackio", "mlflow"."""
        return self._with("trackers", trackers)

    def sample_utilization(self, is_on: bool) -> DdpBuilder:
        """Sample the utilization of the devices ten times a second; on by default."""
        return self._with("sample_utilization", is_on)

    def watch(self, is_on: bool) -> DdpBuilder:
        """Serve the live page of the run on loopback until it ends, and print its address."""
        return self._with("watch", is_on)

    def quiet(self, is_on: bool | Literal["auto"]) -> DdpBuilder:
        """Print nothing about the run: True, False or `auto`, which prints in a terminal or a notebook only."""
        return self._with("quiet", is_on)
