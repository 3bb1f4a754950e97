"""What is judged ok, a warning or a failure, machine by machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.machine.diagnosis import Diagnosis, diagnose
from outrider.machine.machine_facts import Facts, Gpu, MeasuredSpeed, Reduction, TorchBuild, load_facts
from outrider.machine.verdicts import Verdict
from outrider.machine.wheels import load_table
from outrider.virtual.gain_forecast import forecast

FACTS = Path(__file__).parent / "facts"
TABLE = load_table()


def recorded(machine: str) -> Facts:
    return load_facts(FACTS / f"{machine}.json")


def judged(facts: Facts) -> Diagnosis:
    return diagnose(facts, TABLE, forecast=forecast(facts))


def found(facts: Facts, check: str) -> list[Verdict]:
    return [verdict for verdict in judged(facts).verdicts if verdict.check == check]


@pytest.mark.parametrize(
    ("machine", "exit_code", "failures"),
    [
        ("no-gpu", 0, set()),
        ("no-gpu-no-torch-container", 0, set()),
        ("h200", 0, set()),
        ("rtx3090-rtx3060", 0, set()),
        ("v100-a100", 0, set()),
        ("two-amd", 0, set()),
        ("rtx4090-gt1030", 0, set()),
        ("mig-slices", 0, set()),
        ("rtx4080-rtx3070", 1, {"all-reduce"}),
        ("rtx5060ti-gtx1060-bare", 1, {"driver"}),
        ("rtx5060ti-gtx1060-wsl2", 1, {"build"}),
        ("rtx5060ti-gtx1060-wsl2-conda", 1, {"all-reduce"}),
        ("old-driver", 1, {"driver", "build"}),
        ("broken-torch", 1, {"torch"}),
        ("unreadable-nvml", 3, {"sight"}),
    ],
)
def test_each_recorded_machine_is_judged(machine: str, exit_code: int, failures: set[str]) -> None:
    diagnosis = judged(recorded(machine))
    assert diagnosis.exit_code == exit_code
    assert {verdict.check for verdict in diagnosis.verdicts if verdict.level == "failure"} == failures


def test_every_finding_says_why_and_what_to_do() -> None:
    machines = [load_facts(path) for path in FACTS.glob("*.json")]
    findings = [item for facts in machines for item in judged(facts).verdicts if item.level != "ok"]
    assert all(item.why and item.hint for item in findings)


def test_a_wheel_without_the_cards_code_is_a_failure() -> None:
    verdicts = found(recorded("rtx5060ti-gtx1060-wsl2"), "build")
    assert verdicts[1] == Verdict(
        check="build",
        level="failure",
        what="torch 2.13.0+cu130 does not run on NVIDIA GeForce GTX 1060 6GB (sm_61)",
        why="it holds sm_75, sm_80, sm_86, sm_90, sm_100, sm_120; the first kernel would fail",
        hint="run `outrider setup --dry-run` for a build that does",
    )


def test_a_cpu_build_beside_a_card_is_a_failure() -> None:
    facts = recorded("h200")
    cpu = replace(facts.torches[0], archs=(), cuda=None, version="2.13.0+cpu")
    (verdict,) = found(replace(facts, torches=(cpu,)), "build")
    assert verdict.why == "it holds no GPU code at all; the first kernel would fail"


def test_pascal_cannot_compile() -> None:
    newer, pascal = found(recorded("rtx4090-gt1030"), "compile")
    assert (newer.level, newer.what) == ("ok", "torch.compile can serve NVIDIA GeForce RTX 4090 (sm_89)")
    assert (pascal.level, pascal.what) == (
        "warning",
        "torch.compile does not work on NVIDIA GeForce GT 1030 (sm_61)",
    )


def test_a_build_whose_cuda_is_too_new_for_the_driver_is_a_failure() -> None:
    facts = recorded("rtx3090-rtx3060")
    newer = replace(facts.torches[0], version="2.13.0+cu130", cuda="13.0")
    verdict = found(replace(facts, torches=(newer,), speeds=()), "build")[0]
    assert verdict == Verdict(
        check="build",
        level="failure",
        what="torch 2.13.0+cu130 does not run on NVIDIA GeForce RTX 3090 (sm_86)",
        why="its CUDA 13.0 needs driver 580.65.06, found 550.163.01",
        hint="update the driver, or run `outrider setup --dry-run` for a build that fits",
    )


def test_a_card_that_was_seen_to_compute_is_believed() -> None:
    facts = recorded("rtx3090-rtx3060")
    newer = replace(facts.torches[0], version="2.13.0+cu130", cuda="13.0")
    assert [verdict.level for verdict in found(replace(facts, torches=(newer,)), "build")] == ["ok", "ok"]


def test_a_card_that_no_driver_serves_is_told_once() -> None:
    verdicts = judged(recorded("rtx5060ti-gtx1060-bare")).verdicts
    assert [verdict.check for verdict in verdicts if "GTX 1060" in verdict.what + verdict.why] == ["driver"]


def test_cards_hidden_from_cuda_are_counted() -> None:
    (verdict,) = found(replace(recorded("h200"), num_hidden=1), "sight")
    assert (verdict.level, verdict.what) == ("ok", "1 card hidden by CUDA_VISIBLE_DEVICES, and not looked at")


def test_a_cudnn_without_code_for_volta_is_a_failure() -> None:
    facts = recorded("v100-a100")
    newer = replace(facts.torches[0], cudnn="9.11.0")
    (verdict,) = found(replace(facts, torches=(newer,)), "cudnn")
    assert verdict.what == "cuDNN 9.11.0 has no code for Tesla V100-PCIE-16GB (sm_70)"
    assert verdict.level == "failure"


def test_the_cudnn_before_that_is_fine() -> None:
    assert found(recorded("v100-a100"), "cudnn") == []


def test_wrong_numbers_of_nccl_are_a_failure_with_the_cure_that_was_tried() -> None:
    first, second = found(recorded("rtx4080-rtx3070"), "all-reduce")[1:]
    assert (first.level, first.what) == ("failure", "nccl all-reduce on cuda:0 + cuda:1 gives wrong numbers")
    assert first.hint == "set NCCL_P2P_DISABLE=1: the same all-reduce works with it"
    assert second.what == "nccl all-reduce on cuda:0 + cuda:1 with NCCL_P2P_DISABLE=1 works"


def test_a_hang_of_nccl_without_a_cure_points_to_the_cpu_backend() -> None:
    hang = Reduction(backend="nccl", devices=("cuda:0", "cuda:1"), outcome="hang", detail="no answer within 60 s")
    (verdict,) = found(replace(recorded("rtx3090-rtx3060"), reductions=(hang,)), "all-reduce")
    assert (verdict.what, verdict.why) == ("nccl all-reduce on cuda:0 + cuda:1 hangs", "no answer within 60 s")
    assert verdict.hint == "train with backend cpu"


def test_a_small_shared_memory_is_a_warning() -> None:
    (verdict,) = found(recorded("no-gpu-no-torch-container"), "shared-memory")
    assert (verdict.level, verdict.what) == ("warning", "only 64 MiB of shared memory")


def test_no_torch_is_a_warning_that_points_to_setup() -> None:
    (verdict,) = found(recorded("no-gpu-no-torch-container"), "torch")
    assert (verdict.level, verdict.hint) == ("warning", "run `outrider setup`")


def test_a_broken_torch_beside_a_good_one_is_only_a_warning() -> None:
    facts = recorded("no-gpu")
    broken = TorchBuild(interpreter="/opt/other/bin/python", origin="PATH", error="ImportError: libtorch.so")
    (verdict,) = found(replace(facts, torches=(*facts.torches, broken)), "torch")
    assert verdict.level == "warning"


def test_a_card_that_its_driver_does_not_offer_is_a_failure() -> None:
    facts = recorded("h200")
    lost = Gpu(
        index=1, vendor="nvidia", name="NVIDIA H200", capability="9.0", is_served=False, pci_bus_id="0000:02:00.0"
    )
    verdict = found(replace(facts, gpus=(*facts.gpus, lost)), "driver")[1]
    assert verdict.what == "NVIDIA H200 is on the bus, but no driver serves it"
    assert verdict.why == "found at 0000:02:00.0 by the kernel only"


def test_an_amd_card_without_its_driver_is_a_failure() -> None:
    facts = recorded("two-amd")
    unserved = replace(facts.gpus[1], is_served=False)
    (verdict,) = found(replace(facts, gpus=(facts.gpus[0], unserved)), "driver")
    assert verdict.what == "Navi 32 [Radeon RX 7800 XT] is on the bus, but no driver serves it"


def test_peer_access_is_told_where_it_is_and_where_it_is_not() -> None:
    assert [verdict.level for verdict in found(recorded("v100-a100"), "peer")] == ["ok"]
    assert [verdict.what for verdict in found(recorded("rtx3090-rtx3060"), "peer")] == [
        "no peer access between cards 0-1"
    ]


def test_mig_mode_without_a_slice_is_a_failure() -> None:
    facts = recorded("mig-slices")
    bare = replace(facts.gpus[0], mig_slices=())
    (verdict,) = found(replace(facts, gpus=(bare,)), "mig")
    assert verdict.what == "NVIDIA A100-SXM4-80GB is in MIG mode without a slice"


def test_mig_slices_are_named() -> None:
    (verdict,) = found(recorded("mig-slices"), "mig")
    assert "MIG 3g.40gb, MIG 1g.10gb; " in verdict.why


def test_a_throttled_card_and_a_narrow_link_are_warnings() -> None:
    facts = recorded("rtx3090-rtx3060")
    assert found(facts, "throttle")[0].why == "power cap"
    assert found(facts, "pcie")[0].what == "NVIDIA GeForce RTX 3060 sits on 4 of 16 PCIe lanes"


def test_a_device_that_cannot_multiply_is_a_failure() -> None:
    facts = replace(recorded("h200"), speeds=(MeasuredSpeed(device="cuda:0", error="CUDA error: out of memory"),))
    (verdict,) = found(facts, "speed")
    assert (verdict.level, verdict.why) == ("failure", "CUDA error: out of memory")
