"""Measures a user's script or task in short runs, on each device and with each policy, and forecasts from them.

Decides which short runs are needed, how long each takes, and how to read a script's work from its record.
`virtual.advice` computes the forecast. Called by `outrider advise` and as `outrider.advise()`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from outrider.api.options import Options, make_order
from outrider.api.script_run import ScriptRun, UserCommand, refuse_stranger
from outrider.api.train import start
from outrider.errors import ConfigError, OutriderError
from outrider.machine.devices import cuda_devices, resolve_devices
from outrider.policy.policies import SHARED_STEP_POLICIES
from outrider.record.run_folder import RunFolder
from outrider.record.run_forecast import keep_advice
from outrider.replica.recipe import ModelSource, OptimizerFactory, StepFunction
from outrider.virtual.advice import SOLO_POLICY, TRIAL_POLICIES, Advice, TrainingWork, as_document
from outrider.virtual.advice import advise as forecast
from outrider.virtual.trial_reports import FOLDER, LEAST_REPORTS, TrialReports, count_reports, read_trial, samples_per_s
from outrider.world.environment import wanted_devices

TRIAL_S = 4.0
"""Each short run trains at least this long."""
MOST_S = 2.5
"""A short run trains at most this many times as long to collect the reports below, if it has the least number of them.

With the default that is ten seconds, so eight short runs take less than two minutes unless steps take over a second.
"""
STEPS, WINDOWS = 40, 10
"""Reports to collect from a short run: the first for shared steps, the second for local steps or a single device."""
START_S = 600.0
_POLL_S = 0.1

OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrialPlan:
    """One short run."""

    policy: str
    devices: tuple[str, ...]
    folder: Path
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.devices[0]} alone" if len(self.devices) == 1 else f"{self.policy} on {','.join(self.devices)}"

    @property
    def options(self) -> dict[str, Any]:
        """Options that replace the user's; shares and hints are per device, and a short run may have fewer devices."""
        return {
            "policy": self.policy,
            "run_dir": str(self.folder),
            "resume": None,
            "checkpoint_every": None,
            "watch": False,
            "quiet": True,
            "shares": None,
            "speed_hints": None,
        }


class _Deadline:
    """Decides when a short run has measured enough."""

    def __init__(self, plan: _TrialPlan) -> None:
        self._plan = plan
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._wanted = STEPS if plan.policy in SHARED_STEP_POLICIES and len(plan.devices) > 1 else WINDOWS

    def is_over(self) -> bool:
        """Whether to stop now; raises an error for a run that does not begin."""
        now_s, seconds = time.monotonic(), self._plan.seconds
        reports = count_reports(self._plan.folder)
        if self._first_s is None:
            if reports:
                self._first_s = now_s
            elif now_s - self._began_s > START_S:
                raise OutriderError(
                    f"no step or average was seen in {START_S:.0f} s of {self._plan.name}",
                    hint="does it load data for that long, or wait for something?",
                )
            return False
        trained_s = now_s - self._first_s
        # With slow steps the run takes longer than asked for, because too few reports would measure nothing.
        is_late = trained_s >= MOST_S * seconds and reports >= LEAST_REPORTS
        return (trained_s >= seconds and reports >= self._wanted) or is_late


class _Trials(ABC):
    """Makes short runs."""

    @abstractmethod
    def run(self, plan: _TrialPlan) -> None:
        """Run until enough is measured."""


class _ScriptTrials(_Trials):
    def __init__(self, command: UserCommand) -> None:
        self._command = command

    def run(self, plan: _TrialPlan) -> None:
        log = plan.folder.with_suffix(".log")
        run = ScriptRun(self._command, plan.options, devices=plan.devices, log=log, is_trial=True)
        deadline = _Deadline(plan)
        with run:
            while run.is_running and not deadline.is_over():
                run.wait(_POLL_S)
        run.raise_failure()
        if not (plan.folder / FOLDER).is_dir():
            refuse_stranger(self._command)


class _TaskTrials(_Trials):
    def __init__(self, required: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._required, self._options = required, options

    def run(self, plan: _TrialPlan) -> None:
        order = make_order(self._required, {**self._options, **plan.options, "devices": plan.devices})
        deadline = _Deadline(plan)
        with start(order, is_trial=True) as run:
            while run.is_running and not deadline.is_over():
                run.poll()
                time.sleep(_POLL_S)
            run.stop()
            for _ in run:
                pass


def advise(
    model: ModelSource,
    optimizer: OptimizerFactory,
    step: StepFunction,
    dataset: Any,
    *,
    seconds: float = TRIAL_S,
    **options: Unpack[Options],
) -> Advice:
    """Measure a task of `train()` in short runs, and forecast every policy on every choice of its devices.

    Takes the arguments of `train()`. Each short run trains for at least `seconds` and saves no model. `print()` shows
    the result. A later run of the same task in this folder compares itself with the forecast.
    """
    required = {"model": model, "optimizer": optimizer, "step": step, "dataset": dataset}
    make_order(required, options)
    devices = wanted_devices(options.get("devices", "auto"))
    return _advise(_TaskTrials(required, options), devices=devices, seconds=seconds, tell=lambda text: None)


def advise_script(
    command: UserCommand, *, devices: str, seconds: float = TRIAL_S, tell: OnProgress = lambda text: None
) -> Advice:
    """Like `advise` for a user's script; `tell` gets a line before and after each short run."""
    return _advise(_ScriptTrials(command), devices=devices, seconds=seconds, tell=tell)


def _advise(trials: _Trials, *, devices: str | Sequence[str], seconds: float, tell: OnProgress) -> Advice:
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds must be > 0, got {seconds:g}", hint="4 are enough for steps of up to 0.1 s")
    names = tuple(str(spec) for spec in resolve_devices(devices, cuda_devices=cuda_devices()).devices)
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-advise-") as scratch:
        plans = _plans(names, Path(scratch), seconds=seconds)
        measured: dict[tuple[str, tuple[str, ...]], list[TrialReports]] = {}
        for number, plan in enumerate(plans, start=1):
            told = _measure(trials, plan, tell, place=f"{number}/{len(plans)}")
            measured.setdefault((plan.policy, plan.devices), []).append(told)
        workload = _workload(RunFolder(plans[0].folder))
    solos, again = ([measured[SOLO_POLICY, (name,)][turn] for name in names] for turn in (0, -1))
    joint = [measured[policy, names][0] for policy in TRIAL_POLICIES] if len(names) > 1 else []
    advice = forecast(solos, joint, workload, again=again if len(names) > 1 else ())
    _keep(advice)
    return advice


def _keep(advice: Advice) -> None:
    """Save the advice for later runs; if that fails, it is still shown."""
    try:
        keep_advice(as_document(advice))
    except OutriderError as error:
        print(f"outrider: the forecast is not kept for later runs: {error.message}", file=sys.stderr)


def _plans(devices: tuple[str, ...], scratch: Path, *, seconds: float) -> list[_TrialPlan]:
    """Plan the short runs: each device alone, each policy on all devices, and each device alone once more."""
    alone: list[tuple[str, tuple[str, ...]]] = [(SOLO_POLICY, (name,)) for name in dict.fromkeys(devices)]
    together = [(policy, devices) for policy in TRIAL_POLICIES]
    wanted = [*alone, *together, *alone] if len(devices) > 1 else alone
    return [
        _TrialPlan(policy=policy, devices=names, folder=scratch / f"{number}", seconds=seconds)
        for number, (policy, names) in enumerate(wanted)
    ]


def _measure(trials: _Trials, plan: _TrialPlan, tell: OnProgress, *, place: str) -> TrialReports:
    began_s = time.monotonic()
    tell(f"[{place}] {plan.name} ...")
    trials.run(plan)
    told = read_trial(plan.folder, policy=plan.policy, devices=plan.devices, name=plan.name)
    rate = samples_per_s(told.reports[len(told.reports) // 3 :])
    tell(f"[{place}] {plan.name}: {rate:,.0f} samples/s, {time.monotonic() - began_s:.0f} s")
    return told


def _workload(folder: RunFolder) -> TrainingWork:
    """Read the script's work from the record of the first short run."""
    record, config = folder.read_json("record.json"), folder.read_json("config.json")
    assert record is not None, "a run that brought reports has a record"
    options = record["options"]
    sizes = options["batch_size"]
    if options.get("batch_sampler") is not None:
        # Such a run counts batches.
        sizes = 1
    batch_size = round(sum(sizes) / len(sizes)) if isinstance(sizes, list) else int(sizes)
    num_samples = record["num_samples"]
    steps, samples, epochs = (options.get(name) for name in ("steps", "samples", "epochs"))
    total = steps * batch_size if steps else samples or num_samples * (epochs or 1)
    return TrainingWork(
        num_samples=num_samples,
        batch_size=batch_size,
        total_samples=max(total, batch_size),
        may_rest=config is not None and "objects" in config,
        options=options,
        shares_always=config is not None and config.get("shares_always", False),
    )
