"""What NCCL is told before its first communicator, and which worlds it cannot join; real ones are in tests/gpu."""

from __future__ import annotations

import os

import pytest

from outrider.errors import DeviceError
from outrider.world import nccl_environment
from outrider.world.nccl_environment import NcclRank

OURS_TO_END = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def seat(gpu: str, *, host: str = "box", version: str | None = "2.28.9") -> NcclRank:
    return NcclRank(device="cuda:0", host=host, gpu=gpu, nccl=version)


def test_ranks_with_a_gpu_each_are_told_nothing_about_hosts() -> None:
    assert nccl_environment.variables(0, [seat("a"), seat("b")]) == OURS_TO_END


def test_the_same_gpu_name_on_two_hosts_is_not_shared() -> None:
    assert nccl_environment.variables(1, [seat("a", host="box"), seat("a", host="bay")]) == OURS_TO_END


@pytest.mark.parametrize(("rank", "host"), [(0, "outrider-box-0"), (1, "outrider-box-1"), (2, "outrider-box-0")])
def test_ranks_that_share_a_gpu_look_like_ranks_of_two_hosts(rank: int, host: str) -> None:
    told = nccl_environment.variables(rank, [seat("a"), seat("a"), seat("b")])
    assert told == OURS_TO_END | {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def test_ranks_of_several_hosts_do_not_meet_on_loopback() -> None:
    told = nccl_environment.variables(1, [seat("a"), seat("a"), seat("a", host="bay")])
    assert told == OURS_TO_END | {"NCCL_HOSTID": "outrider-box-1"}


@pytest.mark.parametrize("version", ["2.30.0", "2.30.3", "2.31.1", "3.0.0"])
def test_from_2_30_on_it_takes_ranks_that_share_a_gpu(version: str) -> None:
    told = nccl_environment.variables(1, [seat("a", version=version), seat("a", version=version)])
    assert told == OURS_TO_END | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def test_what_the_user_told_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    with nccl_environment.told({"NCCL_SOCKET_IFNAME": "lo", "NCCL_HOSTID": "outrider-box-0"}):
        assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_HOSTID"]) == ("eth0", "outrider-box-0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_HOSTID" not in os.environ


def test_equal_versions_are_fine() -> None:
    nccl_environment.check_versions([seat("a"), seat("b")])


def test_mixed_versions_are_named_by_rank() -> None:
    with pytest.raises(DeviceError) as caught:
        nccl_environment.check_versions([seat("a"), seat("b", version="2.21.5")])
    assert caught.value.message == ("backend nccl needs one version in all ranks: rank 0 has 2.28.9, rank 1 has 2.21.5")
    assert caught.value.hint == 'use torch builds with the same nccl, or pass backend="cpu"'


def test_a_torch_without_nccl_is_named_by_its_rank() -> None:
    with pytest.raises(DeviceError) as caught:
        nccl_environment.check_versions([seat("a"), seat("b", version=None)])
    assert caught.value.message == "backend nccl cannot be used: the torch of rank 1 has no nccl"
    assert caught.value.hint == 'pass backend="cpu"'


def test_a_cpu_rank_takes_its_seat_without_cuda() -> None:
    assert nccl_environment.take_seat(device="cpu", host="box", gpu_index=None) == NcclRank(
        device="cpu", host="box", gpu=None, nccl=None
    )
