"""Real ranks that join a world: by our launcher, under torchrun, and where somebody is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ports import free_port

from outrider.average.transport.backend_table import choose_backend
from outrider.errors import ConfigError, DeviceError, OutriderError, StepError, WaitError
from outrider.launch.launcher import launch
from outrider.machine.devices import parse_devices
from outrider.world.environment import Environment
from outrider.world.messages import Link, adopted_link
from outrider.world.network_interface import loopback_interface
from outrider.world.world import World

TWO = parse_devices("cpu,cpu@0.4")


def lonely_link(devices: str = "cpu", *, world_size: int = 1) -> Link:
    """The link of rank 0 in this process, where no launcher serves the store."""
    environment = Environment(
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        master_port=free_port(),
    )
    return adopted_link(environment, devices=parse_devices(devices))


def tell_about_world(link: Link) -> None:
    with World.join(link, timeout_s=60) as world:
        total = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(total, group=world.group_for("cpu"))
        link.send(
            "world",
            total=total.item(),
            rank=world.rank,
            size=world.size,
            device=str(world.device),
            spec=str(world.spec),
            specs=[str(spec) for spec in world.specs],
            num_threads=torch.get_num_threads(),
            expected_threads=link.num_threads,
            gathered=[world.gather_json("value", {"rank": world.rank}) for _ in range(2)],
            exchanged=[world.exchange_json(world.rank + turn) for turn in range(3)],
            addresses=listening_addresses(),
        )
        world.barrier("the last word")


def listening_addresses() -> list[str]:
    return sorted({one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"})


def fail_while_rank_0_meets(link: Link) -> None:
    with World.join(link, timeout_s=300) as world:
        if world.rank == 1:
            raise ValueError("loss went wrong")
        dist.all_reduce(torch.zeros(1), group=world.group_for("cpu"))


def wait_in_vain(link: Link) -> None:
    with World.join(link, timeout_s=60) as world:
        if world.rank == 0:
            world.barrier("the end of epoch 3", timeout_s=0.2)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks tells about its world, in order of rank."""
    log_dir = tmp_path_factory.mktemp("logs")
    with launch(tell_about_world, {}, devices=TWO, log_dir=log_dir) as ranks:
        messages = sorted(ranks.messages(), key=lambda message: message.rank)
        ranks.raise_error()
    return [message.fields for message in messages]


def test_ranks_know_their_place_and_their_device(worlds: list[dict[str, Any]]) -> None:
    assert [(world["rank"], world["size"], world["device"], world["spec"]) for world in worlds] == [
        (0, 2, "cpu", "cpu"),
        (1, 2, "cpu", "cpu@0.4"),
    ]


def test_every_rank_knows_the_devices_of_all(worlds: list[dict[str, Any]]) -> None:
    assert [world["specs"] for world in worlds] == [["cpu", "cpu@0.4"]] * 2


def test_a_group_for_averages_sums_over_all_ranks(worlds: list[dict[str, Any]]) -> None:
    assert [world["total"] for world in worlds] == [3.0, 3.0]


def test_torch_uses_the_threads_that_the_rank_was_given(worlds: list[dict[str, Any]]) -> None:
    assert [world["num_threads"] for world in worlds] == [world["expected_threads"] for world in worlds]


def test_rank_0_gathers_the_values_of_all_ranks_each_time(worlds: list[dict[str, Any]]) -> None:
    assert worlds[0]["gathered"] == [[{"rank": 0}, {"rank": 1}]] * 2
    assert worlds[1]["gathered"] == [None, None]


def test_exchanged_values_are_the_same_on_all_ranks_each_time(worlds: list[dict[str, Any]]) -> None:
    assert [world["exchanged"] for world in worlds] == [[[0, 1], [1, 2], [2, 3]]] * 2


def test_ranks_of_one_host_listen_on_loopback_only(worlds: list[dict[str, Any]]) -> None:
    assert [world["addresses"] for world in worlds] == [["127.0.0.1"]] * 2


def test_the_exception_of_a_rank_is_reported_and_not_what_it_does_to_its_peer(tmp_path: Path) -> None:
    with launch(fail_while_rank_0_meets, {}, devices=TWO, log_dir=tmp_path) as ranks:
        list(ranks.messages())
        with pytest.raises(OutriderError) as caught:
            ranks.raise_error()
    assert isinstance(caught.value, StepError)
    assert caught.value.message == "rank 1 (cpu@0.4): ValueError: loss went wrong"


def test_a_barrier_says_what_it_waited_for_and_who_did_not_come(tmp_path: Path) -> None:
    with launch(wait_in_vain, {}, devices=TWO, log_dir=tmp_path) as ranks:
        list(ranks.messages())
        with pytest.raises(WaitError) as caught:
            ranks.raise_error()
    assert caught.value.message == "rank 0 waited 0.2 s for the end of epoch 3, rank 1 did not come"
    assert caught.value.hint == "see the logs of the missing ranks"


# In this process: a world of one, and worlds that cannot be.


@pytest.fixture
def same_threads_afterwards() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("same_threads_afterwards")
def test_a_world_of_one_leaves_nothing_behind() -> None:
    with World.join(lonely_link(), timeout_s=60) as world:
        assert world.exchange_json("alone") == ["alone"]
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("same_threads_afterwards")
def share_kept() -> float:
    """Of so many tiny numbers that every thread of torch gets some."""
    return (torch.full((1_000_000,), 1e-38) * 0.1 != 0).double().mean().item()


def tell_tiny_numbers(link: Link) -> None:
    with World.join(link, timeout_s=60), ThreadPoolExecutor(1) as pool:
        link.send("kept", here=share_kept(), in_thread=pool.submit(share_kept).result())


def test_ranks_that_we_started_take_tiny_numbers_for_zero_in_all_their_threads(tmp_path: Path) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("torch cannot flush tiny numbers on this processor")
    with launch(tell_tiny_numbers, {}, devices=TWO, log_dir=tmp_path, num_threads=2) as ranks:
        told = [message.fields for message in ranks.messages() if message.kind == "kept"]
        ranks.raise_error()
    assert told == [{"here": 0.0, "in_thread": 0.0}] * 2


def test_a_process_of_the_users_keeps_its_tiny_numbers() -> None:
    with World.alone(lonely_link()):
        assert share_kept() == 1.0


def test_a_rank_that_never_starts_is_named_and_nothing_is_left() -> None:
    with pytest.raises(WaitError) as caught:
        World.join(lonely_link("cpu,cpu", world_size=2), timeout_s=0.5)
    assert caught.value.message == "rank 0 waited 0.5 s for all ranks to start, rank 1 did not come"


@pytest.mark.usefixtures("same_threads_afterwards")
def test_a_slice_whose_share_nobody_set_is_refused_before_cuda_starts() -> None:
    with pytest.raises(DeviceError, match="rank 0 is to use cuda:99%12, but CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is not"):
        World.join(lonely_link("cuda:99%12"), timeout_s=5)


@pytest.mark.usefixtures("same_threads_afterwards")
def test_a_device_that_torch_does_not_find_is_an_error_of_that_rank() -> None:
    with pytest.raises(DeviceError) as caught:
        World.join(lonely_link("cuda:99"), timeout_s=5)
    found = torch.cuda.device_count()
    assert caught.value.message == f"rank 0 is to use cuda:99, torch {torch.__version__} finds {found} cuda devices"
    assert caught.value.hint == "run `outrider diagnose`"


def test_the_loopback_interface_is_one_of_this_machine() -> None:
    assert loopback_interface() in psutil.net_if_addrs()


# Which backend.


@pytest.mark.parametrize(
    ("asked", "devices", "backend", "reason"),
    [
        ("auto", "cpu,cpu@0.4", "cpu", "auto: rank 0 is on cpu, and nccl joins CUDA devices only"),
        ("auto", "cuda:0,cpu", "cpu", "auto: rank 1 is on cpu, and nccl joins CUDA devices only"),
        ("auto", "cuda:0,cuda:0", "cpu", "auto: ranks 0 and 1 share cuda:0 without slices, where nccl is slower"),
        ("auto", "cuda:0%80,cuda:0%16", "nccl", "auto: every rank has a CUDA device, or a slice of one, of its own"),
        ("auto", "cuda:0%80,cuda:0", "nccl", "auto: every rank has a CUDA device, or a slice of one, of its own"),
        ("auto", "cuda:0,cuda:1", "nccl", "auto: every rank has a CUDA device, or a slice of one, of its own"),
        ("nccl", "cuda:0,cuda:0", "nccl", "asked for"),
        ("nccl", "cuda:0%80,cuda:0%16", "nccl", "asked for"),
        ("cpu", "cuda:0,cuda:1", "cpu", "asked for"),
    ],
)
def test_the_backend_follows_the_devices_and_says_why(
    monkeypatch: pytest.MonkeyPatch, asked: str, devices: str, backend: str, reason: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    choice = choose_backend(asked, parse_devices(devices))
    assert (choice.backend, choice.reason) == (backend, reason)


def test_the_same_device_name_on_two_hosts_is_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend("auto", parse_devices("cuda:0,cuda:0"), hosts=("a", "b")).backend == "nccl"


def test_a_torch_without_nccl_averages_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    choice = choose_backend("auto", parse_devices("cuda:0,cuda:1"))
    assert (choice.backend, choice.reason) == ("cpu", "auto: this torch was built without nccl")


def test_nccl_without_cuda_is_refused() -> None:
    with pytest.raises(DeviceError) as caught:
        choose_backend("nccl", parse_devices("cpu,cpu@0.4"))
    assert caught.value.message == ("backend nccl cannot be used: rank 0 is on cpu, and nccl joins CUDA devices only")
    assert caught.value.hint == 'leave backend out, or pass backend="cpu"'


def test_an_unknown_backend_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend("ncll", parse_devices("cpu"))
    assert caught.value.message == "unknown backend 'ncll'"
    assert caught.value.hint == "did you mean nccl? backends are auto, cpu, nccl"


# Ranks that others started.

ADOPTED_SCRIPT = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from outrider.world.environment import adopted, local_devices
from outrider.world.messages import adopted_link
from outrider.world.world import World

environment = adopted()
link = adopted_link(environment, devices=local_devices(environment, "cpu,cpu@0.4", cuda_devices=()))
with World.join(link, timeout_s=60) as world:
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total, group=world.group_for("cpu"))
    told = {"total": total.item(), "spec": str(world.spec), "has_store": environment.has_store}
    everyone = world.gather_json("told", told)
if everyone:
    Path(sys.argv[1]).write_text(json.dumps(everyone))
"""


def test_ranks_of_torchrun_are_adopted(tmp_path: Path) -> None:
    script, result = tmp_path / "script.py", tmp_path / "result.json"
    script.write_text(ADOPTED_SCRIPT)
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(result)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(result.read_text()) == [
        {"total": 3.0, "spec": "cpu", "has_store": True},
        {"total": 3.0, "spec": "cpu@0.4", "has_store": True},
    ]


def test_ranks_without_an_agent_meet_at_the_store_of_rank_0(tmp_path: Path) -> None:
    script, result = tmp_path / "script.py", tmp_path / "result.json"
    script.write_text(ADOPTED_SCRIPT)
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(script), str(result)]
    first = subprocess.Popen(command, env={**shared, "RANK": "0"})
    second = subprocess.Popen(command, env={**shared, "RANK": "1"})
    assert (first.wait(120), second.wait(120)) == (0, 0)
    assert [told["has_store"] for told in json.loads(result.read_text())] == [False, False]
