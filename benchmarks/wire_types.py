"""What rounded averages cost in learning: a small language model in the lab with `wire` fp32, bf16 and int8.

Two replicas of speeds 1 and 0.45 in virtual time. Each seed is a block of runs with the same data, order and initial
parameters. Controls show whether the study can tell at all: 8 bits without error feedback, and three levels in place of
255, with and without it. One JSON line per run, flushed as it ends; runs that the file has are skipped. Then a table of
losses on other text, and of their difference to fp32 by seed with its mean and 95 % interval.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from small_gpt import TASKS, interval, recipe

from outrider.average import exchange, wire_codec
from outrider.virtual.lab import Bench, train

BENCH = Bench(speeds=(1.0, 0.45))
CONTROLS = ("int8 without feedback", "three levels", "three levels without feedback")
WAYS = ("fp32", "bf16", "int8", *CONTROLS)


@contextmanager
def changed(way: str) -> Iterator[None]:
    """The codec of a control; no option of the product."""
    with ExitStack() as stack:
        if way.endswith("without feedback"):
            stack.enter_context(patch.object(exchange, "keep_feedback", lambda *_, **__: None))
        if way.startswith("three levels"):
            stack.enter_context(patch.object(wire_codec, "_LARGEST", 1.0))
        yield


def run(way: str, *, data: Path, policy: str, anchor: int, steps: int, seed: int) -> dict[str, Any]:
    wire = "int8" if way in CONTROLS else way
    with changed(way):
        options = {"policy": policy, "wire": wire, "anchor": anchor}
        result = train(recipe(TASKS["shakespeare"], data, steps=steps, seed=seed, **options), BENCH)
    loss = round(result.points[-1].eval or 0.0, 6)
    setting = {"policy": policy, "anchor": anchor, "way": way, "steps": steps, "seed": seed}
    return {**setting, "loss": loss, "averages": result.averages}


def table(records: list[dict[str, Any]]) -> Iterable[str]:
    yield "| policy, anchor | wire | loss by seed | less fp32, mean and interval |"
    yield "| --- | --- | --- | --- |"
    for policy, anchor, way in dict.fromkeys((one["policy"], one["anchor"], one["way"]) for one in records):
        same = [one for one in records if (one["policy"], one["anchor"]) == (policy, anchor)]
        mine = {one["seed"]: one["loss"] for one in same if one["way"] == way}
        exact = {one["seed"]: one["loss"] for one in same if one["way"] == "fp32"}
        listed = ", ".join(f"{loss:.4f}" for loss in mine.values())
        apart = "" if way == "fp32" else interval([mine[seed] - exact[seed] for seed in mine])
        yield f"| {policy}, {anchor} | {way} | {listed} | {apart} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("data", type=Path, help="a folder with shakespeare/input.txt")
    parser.add_argument("--steps", type=int, default=600, help="batches of both replicas together")
    parser.add_argument("--seeds", type=int, default=3, help="at most 10")
    parser.add_argument("--anchors", type=int, nargs="+", default=[2, 20])
    parser.add_argument("--policies", nargs="+", default=["cadence"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(one["policy"], one["anchor"], one["way"], one["seed"]) for one in records}
    for seed in range(options.seeds):
        for policy in options.policies:
            for anchor in options.anchors:
                for way in WAYS:
                    if (policy, anchor, way, seed) in done:
                        continue
                    setting = {"policy": policy, "anchor": anchor, "steps": options.steps, "seed": seed}
                    records.append(run(way, data=options.data, **setting))
                    with options.output.open("a") as file:
                        file.write(json.dumps(records[-1], separators=(",", ":")) + "\n")
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
