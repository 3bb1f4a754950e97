"""Runs a user's script in each policy and with each seed, one after the other, until the target is reached.

Decides the order of the runs, their folders, and what makes a comparison the same one that was interrupted before.
`race` judges the times. Called by `outrider compare`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.api.script_run import ScriptRun, UserCommand, refuse_stranger
from outrider.bench.comparison.race import RaceRun
from outrider.bench.comparison.target_metric import TargetMetric
from outrider.errors import ConfigError, OutriderError
from outrider.machine.devices import cuda_devices, resolve_devices
from outrider.policy.policies import policy_spec
from outrider.record.run_folder import RunFolder, make_folder
from outrider.timeline.timeline_files import EPOCHS

SCHEMA_VERSION = 1
SOLO = "solo"
SOLO_POLICY = "sync"
_COMPARISON, _RESULT = "comparison.json", "result.json"
_POLL_S = 0.2

OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyComparison:
    """What is compared, and where."""

    command: UserCommand
    policies: tuple[str, ...]
    """`solo` is the first device alone."""
    devices: tuple[str, ...]
    target: TargetMetric
    seeds: int
    folder: Path

    @classmethod
    def make(
        cls, command: UserCommand, *, policies: str, devices: str, target: str, seeds: int, folder: Path | None
    ) -> PolicyComparison:
        """Check what the user wrote."""
        names = tuple(dict.fromkeys(name.strip() for name in policies.split(",")))
        for name in names:
            if name != SOLO:
                policy_spec(name)
        if len(names) < 2:
            raise ConfigError(f"one policy cannot be compared: {policies!r}", hint="pass --policies solo,sync,async")
        if seeds < 1:
            raise ConfigError(f"seeds must be >= 1, got {seeds}", hint="three give an interval that means something")
        specs = resolve_devices(devices, cuda_devices=cuda_devices()).devices
        if len(specs) < 2:
            raise ConfigError(
                f"policies differ on two devices or more, got {','.join(map(str, specs))}",
                hint="pass --devices cuda:0,cuda:1, or without GPUs cpu,cpu@0.5",
            )
        return cls(
            command=command,
            policies=names,
            devices=tuple(str(spec) for spec in specs),
            target=TargetMetric.parse(target),
            seeds=seeds,
            folder=folder or Path("runs") / f"compare-{command.script.stem}",
        )

    def identity(self) -> dict[str, Any]:
        """What all runs of a comparison have in common; policies and seeds may be added later."""
        return {
            "schema_version": SCHEMA_VERSION,
            "script": str(self.command.script),
            "script_sha256": hashlib.sha256(self.command.script.read_bytes()).hexdigest(),
            "arguments": list(self.command.arguments),
            "devices": list(self.devices),
            "target": repr(self.target),
        }

    def order(self) -> list[tuple[str, int]]:
        """Policies and seeds, interleaved; each seed begins with another policy, so that no policy is always first."""
        pairs = []
        for seed in range(self.seeds):
            shift = seed % len(self.policies)
            pairs += [(policy, seed) for policy in (*self.policies[shift:], *self.policies[:shift])]
        return pairs


def run_comparison(comparison: PolicyComparison, tell: OnProgress = lambda text: None) -> list[RaceRun]:
    """Make the runs that are missing, and return all."""
    _open(comparison)
    runs: list[RaceRun] = []
    order = comparison.order()
    for number, (policy, seed) in enumerate(order, start=1):
        place = f"[{number}/{len(order)}] {policy}, seed {seed}"
        kept = _kept(_folder(comparison, policy, seed))
        if kept is None:
            tell(f"{place} ...")
            # A script whose first run fails would fail in all.
            kept = _run(comparison, policy, seed, may_fail=bool(runs))
        tell(f"{place}: {_in_words(kept, comparison.target)}")
        runs.append(kept)
    # As the user named them, not as they were run.
    return sorted(runs, key=lambda run: (comparison.policies.index(run.policy), run.seed))


def _open(comparison: PolicyComparison) -> None:
    """Begin or go on with a comparison; a folder with another one is refused."""
    folder, identity = RunFolder(comparison.folder), comparison.identity()
    before = folder.read_json(_COMPARISON)
    if before is None:
        make_folder(comparison.folder)
        folder.write_json(_COMPARISON, identity)
        return
    changed = [name for name in identity if before.get(name) != identity[name]]
    if changed:
        raise ConfigError(
            f"{comparison.folder} holds a comparison with another {changed[0].replace('_sha256', '')}",
            hint="pass --output another_folder, or remove that one",
        )


def _folder(comparison: PolicyComparison, policy: str, seed: int) -> Path:
    return comparison.folder / policy / f"seed-{seed}"


def _kept(folder: Path) -> RaceRun | None:
    fields = RunFolder(folder).read_json(_RESULT)
    return None if fields is None else RaceRun(**fields)


def _run(comparison: PolicyComparison, policy: str, seed: int, *, may_fail: bool) -> RaceRun:
    """One run of the script, up to the target, to its own end or to a failure."""
    folder = _folder(comparison, policy, seed)
    # What an interrupted run left.
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    run_dir = (folder / "run").absolute()
    options = {
        "policy": SOLO_POLICY if policy == SOLO else policy,
        "seed": seed,
        "run_dir": str(run_dir),
        "resume": None,
        "checkpoint_every": None,
        "watch": False,
        # Given per device, and one of them alone is fewer.
        "shares": None,
        "speed_hints": None,
    }
    devices = comparison.devices[:1] if policy == SOLO else comparison.devices
    with ScriptRun(comparison.command, options, devices=devices, log=folder / "script.log") as script:
        while script.is_running:
            script.wait(_POLL_S)
            if any(comparison.target.is_reached(epoch) for epoch in read_epochs(run_dir)):
                script.stop()
    epochs = read_epochs(run_dir)
    if not any(comparison.target.is_reached(epoch) for epoch in epochs):
        try:
            script.raise_failure()
        except OutriderError as error:
            if not may_fail:
                raise
            return _failed(comparison, policy, seed, epochs, error)
    if not epochs:
        refuse_stranger(comparison.command)
    return _result(comparison, policy, seed, epochs)


def _failed(
    comparison: PolicyComparison, policy: str, seed: int, epochs: Sequence[dict[str, Any]], error: OutriderError
) -> RaceRun:
    """A run that failed after others had ended well, as one that diverged: it never reached the target."""
    best = comparison.target.best_of(epochs)
    run = RaceRun(policy=policy, seed=seed, seconds=None, epochs=len(epochs), best=best, error=error.message)
    return _saved(comparison, run)


def _result(comparison: PolicyComparison, policy: str, seed: int, epochs: Sequence[dict[str, Any]]) -> RaceRun:
    target = comparison.target
    if target.best_of(epochs) is None:
        told = sorted({name for epoch in epochs for name in epoch.get("logged", {})})
        raise ConfigError(
            f"no epoch of {comparison.command.script.name} has {target.metric!r}",
            hint="evaluate inside the loop over epochs (s.evaluate, s.evaluate_together, evaluate=), or use a metric "
            f"that it has: {', '.join(['loss', *told])}",
        )
    reached = next((epoch for epoch in epochs if target.is_reached(epoch)), None)
    if reached is not None:
        # A short epoch may end before the script is stopped.
        epochs = epochs[: epochs.index(reached) + 1]
    run = RaceRun(
        policy=policy,
        seed=seed,
        seconds=None if reached is None else reached["wall_s"],
        epochs=len(epochs),
        best=target.best_of(epochs),
    )
    return _saved(comparison, run)


def _saved(comparison: PolicyComparison, run: RaceRun) -> RaceRun:
    RunFolder(_folder(comparison, run.policy, run.seed)).write_json(_RESULT, asdict(run))
    return run


def read_epochs(run_dir: Path) -> list[dict[str, Any]]:
    """The epochs of a run so far; a line that is being written does not count yet."""
    try:
        text = (run_dir / EPOCHS).read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _in_words(run: RaceRun, target: TargetMetric) -> str:
    if run.seconds is not None:
        return f"{target} after {run.seconds:,.1f} s, epoch {run.epochs}"
    return f"not {target}: {run.missed_in_words}"
