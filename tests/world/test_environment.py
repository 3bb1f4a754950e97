"""Who a process is, from the variables of torchrun, SLURM and our launcher."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.machine.devices import parse_devices
from outrider.world.environment import Environment, adopted, launched, local_devices

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def environment(*, rank: int, world_size: int, local_rank: int, local_world_size: int) -> Environment:
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr="node0",
        master_port=29500,
    )


def test_nobody_started_ranks_here() -> None:
    assert adopted({}) is None


def test_torchrun_is_adopted() -> None:
    assert adopted(TORCHRUN) == Environment(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        master_addr="node0",
        master_port=29500,
        has_store=True,
    )


def test_slurm_is_adopted_and_counts_the_ranks_of_this_node() -> None:
    assert adopted(SLURM) == Environment(
        rank=4, local_rank=0, world_size=5, local_world_size=1, master_addr="10.0.0.1", master_port=19711
    )


def test_slurm_on_one_node_stays_on_loopback() -> None:
    found = adopted({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"})
    assert found is not None
    assert (found.master_addr, found.is_one_host) == ("127.0.0.1", True)


def test_the_shell_of_a_batch_job_is_no_rank() -> None:
    assert adopted({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) is None


def test_slurm_on_several_nodes_needs_an_address() -> None:
    variables = {name: value for name, value in SLURM.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    with pytest.raises(ConfigError) as caught:
        adopted(variables)
    assert caught.value.message == "SLURM started the ranks on several nodes, but MASTER_ADDR is not set"
    assert caught.value.hint == "export MASTER_ADDR with the name of the first node before srun"


def test_kubernetes_has_one_rank_per_pod() -> None:
    found = adopted({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"})
    assert found is not None
    assert (found.local_rank, found.local_world_size, found.has_store) == (0, 1, False)


def test_ranks_that_meet_on_loopback_are_on_one_host() -> None:
    found = adopted({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    assert found is not None
    assert (found.local_rank, found.local_world_size, found.is_one_host) == (1, 2, True)


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "[::1]", "LOCALHOST", "ip6-localhost"])
def test_loopback_has_many_names(address: str) -> None:
    found = adopted({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"})
    assert found is not None
    assert (found.local_rank, found.is_one_host, found.store_addr) == (1, True, "127.0.0.1")


def test_brackets_around_an_ipv6_address_are_dropped() -> None:
    found = adopted({**TORCHRUN, "MASTER_ADDR": "[fd00::1]"})
    assert found is not None
    assert (found.master_addr, found.is_one_host, found.store_addr) == ("fd00::1", False, "fd00::1")


def test_ranks_of_one_node_meet_on_loopback_whatever_the_master_address() -> None:
    one_node = {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "MASTER_ADDR": "node7"}
    found = [adopted({**SLURM, **one_node}), adopted({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})]
    assert [one and (one.is_one_host, one.store_addr) for one in found] == [(True, "127.0.0.1")] * 2


def test_restarts_of_torchrun_are_not_told_apart_by_its_count() -> None:
    """Agents count for themselves, so ranks of one attempt would look for each other under different keys."""
    first, second = (adopted({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "2"))
    assert first == second


@pytest.mark.parametrize(
    ("variables", "message", "hint"),
    [
        (
            {"RANK": "0"},
            "RANK is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not",
            "start the program with torchrun, or unset RANK",
        ),
        (
            {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK is set but WORLD_SIZE is not",
            "start the program with torchrun, or unset RANK",
        ),
        ({**TORCHRUN, "RANK": "one"}, "RANK must be a whole number, got 'one'", "unset RANK, or use torchrun"),
        (
            {**TORCHRUN, "RANK": "4"},
            "RANK must be 0 to 3 with WORLD_SIZE=4, got 4",
            "start the program with torchrun, or unset RANK",
        ),
    ],
)
def test_an_incomplete_environment_is_refused(variables: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        adopted(variables)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_a_rank_of_our_launcher_knows_itself_and_is_not_adopted() -> None:
    variables = environment(rank=1, world_size=2, local_rank=1, local_world_size=2).variables()
    found = launched(variables)
    assert found is not None
    assert (found.rank, found.world_size, found.has_store) == (1, 2, True)
    assert adopted(variables) is None


@pytest.mark.parametrize(
    ("devices", "cuda", "expected"),
    [
        ("auto", ("cuda:0", "cuda:1"), "cuda:0,cuda:1"),
        ("auto", ("cuda:0",), "cuda:0,cuda:0"),
        ("auto", (), "cpu,cpu"),
        ("cpu,cpu@0.4", (), "cpu,cpu@0.4"),
        ("cpu,cpu,cpu@0.3,cpu@0.4", (), "cpu@0.3,cpu@0.4"),
    ],
)
def test_ranks_that_exist_get_their_part_of_the_devices(devices: str, cuda: tuple[str, ...], expected: str) -> None:
    here = environment(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert local_devices(here, devices, cuda_devices=cuda) == parse_devices(expected)


def test_a_number_of_devices_that_fits_no_rank_is_refused() -> None:
    here = environment(rank=3, world_size=4, local_rank=1, local_world_size=2)
    with pytest.raises(ConfigError) as caught:
        local_devices(here, "cpu,cpu,cpu", cuda_devices=())
    assert caught.value.message == "3 devices given for 4 ranks that were started already"
    assert caught.value.hint == 'give one device per rank, or devices="auto"'
