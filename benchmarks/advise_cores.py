"""Cells of the table of `outrider advise` side by side on one machine with many cores: each has two cores of its own.

Decides which cores a cell has and when to stop; `advise_table.py run` measures a cell. CPU cells run at the same time,
cells on slices of the GPU one after another on the remaining cores. Finished cells go to records.jsonl, all output to
log.txt.

    python benchmarks/advise_cores.py FOLDER --data runs/data --deadline-s 525
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

CPU_CELLS = [f"{model}@cpu,cpu@{speed}" for speed in ("0.1", "0.4", "0.8333") for model in ("gpt-nano", "char-rnn")]
GPU_CELLS = [
    "gpt-nano@cuda:0%60,cuda:0%25",
    "char-rnn@cuda:0%60,cuda:0%25",
    "lenet@cuda:0%60,cuda:0%25",
    "conv-ae@cuda:0%60,cuda:0%25",
    "mlp@cuda:0%60,cuda:0%25",
    "logistic@cuda:0%60,cuda:0%25",
    "gpt-nano@cuda:0%70,cuda:0%28",
    "char-rnn@cuda:0%70,cuda:0%28",
]
END_S = 12.0
"""Kept of the time, to end what still runs."""
SPARE_S = 15.0
"""What a cell may take longer than planned."""
GPU_CELL_S = 165.0
SHARED_CORE = 1.25
"""Two cores that slow each other down by so much are threads of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    data: Path
    batch_size: int
    gpu_batch_size: int
    trial_s: float
    gpu_trial_s: float


class Output:
    """The two files of the folder, written by several threads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._records, self._log = folder / "records.jsonl", folder / "log.txt"
        self._lock, self._began_s = threading.Lock(), time.monotonic()

    def tell(self, name: str, line: str) -> None:
        text = f"{time.monotonic() - self._began_s:6.1f} {name}: {line.rstrip()}"
        with self._lock, self._log.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    def keep(self, record: str) -> None:
        with self._lock, self._records.open("a") as file:
            file.write(record + "\n")


# Cores


def spin(core: int, sender: Connection) -> None:
    """How many rounds of plain Python a core makes in 0.4 s."""
    os.sched_setaffinity(0, {core})
    end_s, rounds = time.monotonic() + 0.4, 0
    while time.monotonic() < end_s:
        sum(range(300))
        rounds += 1
    sender.send(rounds)


def rounds_of(cores: Sequence[int]) -> list[int]:
    context = get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in cores]
    spinners = [context.Process(target=spin, args=(core, pipe[1])) for core, pipe in zip(cores, pipes, strict=True)]
    for one in spinners:
        one.start()
    rounds = [pipe[0].recv() for pipe in pipes]
    for one in spinners:
        one.join()
    return rounds


def slowdown(first: int, second: int) -> float:
    """The least of three tries, because other programs may run."""
    return min(rounds_of([first])[0] / rounds_of([first, second])[0] for _ in range(3))


def threads_of_cores(cores: Sequence[int], tell: Callable[[str], None]) -> list[list[int]]:
    """The threads of each core: two, where neighbours or the two halves of the list slow each other down."""
    half = len(cores) // 2
    if half < 2:
        return [[core] for core in cores]
    neighbour, across = slowdown(cores[0], cores[1]), slowdown(cores[0], cores[half])
    tell(f"{cores[0]} beside {cores[1]} takes {neighbour:.2f} times as long, beside {cores[half]} {across:.2f}")
    if max(neighbour, across) < SHARED_CORE:
        return [[core] for core in cores]
    if neighbour > across:
        return [list(pair) for pair in zip(cores[::2], cores[1::2], strict=True)]
    return [list(pair) for pair in zip(cores[:half], cores[half:], strict=True)]


# Cells


def command(cell: str, output: Path, cell_s: float, options: Options) -> list[str]:
    model, devices = cell.split("@", 1)
    on_gpu = "cuda" in devices
    is_text = model in ("gpt-nano", "char-rnn")
    words = [sys.executable, str(Path(__file__).with_name("advise_table.py")), "run", str(output)]
    words += ["--data", str(options.data), "--models", model, "--pairs", devices, "--cell-s", f"{cell_s - SPARE_S:.0f}"]
    words += ["--trial-s", str(options.gpu_trial_s if on_gpu else options.trial_s)]
    if is_text:
        words += ["--batch-size", str(options.gpu_batch_size if on_gpu else options.batch_size)]
    if on_gpu:
        words += ["--samples", "1000000"]
    return words


def measure(cell: str, cores: Sequence[int], output: Output, *, cell_s: float, end_s: float, options: Options) -> None:
    """Run one cell in a process of its own, which is stopped at `end_s`."""
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "record.jsonl"
        output.tell(cell, f"on cores {','.join(map(str, cores))}, {cell_s:.0f} s")
        process = subprocess.Popen(
            command(cell, record, cell_s, options),
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, set(cores)),
        )
        stopper = threading.Timer(max(0.0, end_s - time.monotonic()), lambda: process.send_signal(signal.SIGINT))
        stopper.start()
        assert process.stdout is not None
        for line in process.stdout:
            output.tell(cell, line)
        code = process.wait()
        stopper.cancel()
        if record.exists():
            output.keep(json.dumps({**json.loads(record.read_text()), "cores": list(cores)}, separators=(",", ":")))
        output.tell(cell, f"ended with {code}")


def one_after_another(
    cells: Sequence[str], cores: Sequence[int], output: Output, *, end_s: float, options: Options
) -> None:
    for cell in cells:
        left_s = end_s - time.monotonic()
        if left_s < 0.8 * GPU_CELL_S:
            output.tell(cell, "left out, too little time")
            continue
        measure(cell, cores, output, cell_s=min(left_s, GPU_CELL_S), end_s=end_s, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cpu", nargs="*", default=CPU_CELLS, help="Cells that run at the same time: MODEL@DEVICES.")
    parser.add_argument("--gpu", nargs="*", default=GPU_CELLS, help="Cells that run one after another.")
    parser.add_argument("--deadline-s", type=float, default=525.0)
    parser.add_argument("--batch-size", type=int, default=4, help="Of the text models on CPUs.")
    parser.add_argument("--gpu-batch-size", type=int, default=256)
    parser.add_argument("--trial-s", type=float, default=4.0)
    parser.add_argument("--gpu-trial-s", type=float, default=1.5)
    given = parser.parse_args()
    end_s = time.monotonic() + given.deadline_s - END_S
    output = Output(given.folder)
    output.tell("machine", f"{platform.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    cores = threads_of_cores(sorted(os.sched_getaffinity(0)), lambda line: output.tell("cores", line))
    options = Options(
        data=given.data.resolve(),
        batch_size=given.batch_size,
        gpu_batch_size=given.gpu_batch_size,
        trial_s=given.trial_s,
        gpu_trial_s=given.gpu_trial_s,
    )
    num_kept = -(-len(cores) // 4) if given.gpu else 0
    # Of the cores of a CPU cell only one thread works, because two would slow each other down.
    usable = [threads[0] for threads in cores[: len(cores) - num_kept]]
    pairs = [usable[i : i + 2] for i in range(0, len(usable) - 1, 2)]
    for cell in given.cpu[len(pairs) :]:
        output.tell(cell, "left out, too few cores")
    limits = {"end_s": end_s, "options": options}
    cell_s = end_s - time.monotonic()
    workers = [
        threading.Thread(target=measure, args=(cell, pair, output), kwargs={"cell_s": cell_s, **limits}, daemon=True)
        for cell, pair in zip(given.cpu, pairs, strict=False)
    ]
    if given.gpu:
        rest = [thread for threads in cores[len(cores) - num_kept :] for thread in threads]
        workers.append(
            threading.Thread(target=one_after_another, args=(given.gpu, rest, output), kwargs=limits, daemon=True)
        )
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, end_s + END_S - 2 - time.monotonic()))
    output.tell("machine", f"done, load {os.getloadavg()[0]:.1f}")
    # What does not end at Ctrl-C must not keep this command.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
