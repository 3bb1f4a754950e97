"""All-reduces and speeds are measured in children that may hang, crash or lie."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.machine.machine_facts import Facts, Gpu, Host, TorchBuild
from outrider.machine.probes import all_reduce, measure_reductions, measure_speed, usable_cards, with_probes


def stand_in(folder: Path, body: str) -> TorchBuild:
    """A build whose interpreter is a shell script; its arguments are $1 script, $2 rank or device."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return TorchBuild(interpreter=str(path), origin="test", version="2.13.0", num_devices=2, archs=("sm_86",))


def card(index: int, capability: str = "8.6") -> Gpu:
    return Gpu(index=index, vendor="nvidia", name=f"card {index}", capability=capability)


def test_gloo_really_adds_two_ranks() -> None:
    pytest.importorskip("torch")
    build = TorchBuild(interpreter=sys.executable, origin="this Python")
    reduction = all_reduce(build, "gloo", ("cpu", "cpu"))
    assert (reduction.outcome, reduction.detail) == ("ok", None)


def test_a_real_device_has_a_speed() -> None:
    pytest.importorskip("torch")
    speed = measure_speed(TorchBuild(interpreter=sys.executable, origin="this Python"), "cpu", seconds=0.1)
    assert speed.error is None
    assert (speed.matmul_tflops or 0) > 0
    assert (speed.memory_gb_per_s or 0) > 0


def test_wrong_numbers_of_one_rank_are_an_outcome(tmp_path: Path) -> None:
    body = """[ "$2" = 1 ] && echo '{"outcome": "wrong", "detail": "3 of 9 sums differ in round 0"}' && exit
echo '{"outcome": "ok", "detail": null}'"""
    reduction = all_reduce(stand_in(tmp_path, body), "nccl", ("cuda:0", "cuda:1"))
    assert (reduction.outcome, reduction.detail) == ("wrong", "3 of 9 sums differ in round 0")


def test_a_hang_is_an_outcome_and_leaves_no_process(tmp_path: Path) -> None:
    reduction = all_reduce(stand_in(tmp_path, "sleep 60"), "nccl", ("cuda:0", "cuda:1"), timeout_s=0.2)
    assert (reduction.outcome, reduction.detail) == ("hang", "no answer within 0.2 s")


def test_a_crash_is_an_outcome(tmp_path: Path) -> None:
    reduction = all_reduce(stand_in(tmp_path, "echo boom >&2; exit 3"), "nccl", ("cuda:0", "cuda:1"))
    assert (reduction.outcome, reduction.detail) == ("error", "boom")


def test_a_crash_is_told_also_where_it_makes_the_other_rank_wait(tmp_path: Path) -> None:
    body = """[ "$2" = 1 ] && echo "Duplicate GPU detected" >&2 && exit 1
sleep 60"""
    reduction = all_reduce(stand_in(tmp_path, body), "nccl", ("cuda:0", "cuda:1"), timeout_s=0.5)
    assert (reduction.outcome, reduction.detail) == ("error", "Duplicate GPU detected")


def test_a_pair_that_fails_is_tried_again_without_peer_access(tmp_path: Path) -> None:
    body = """[ "$4" = nccl ] && [ -z "$NCCL_P2P_DISABLE" ] && echo bad >&2 && exit 1
echo '{"outcome": "ok", "detail": null}'"""
    tried = list(measure_reductions(stand_in(tmp_path, body), (card(0), card(1))))
    assert [(item.backend, item.outcome, item.environment) for item in tried] == [
        ("gloo", "ok", {}),
        ("nccl", "error", {}),
        ("nccl", "ok", {"NCCL_P2P_DISABLE": "1"}),
    ]


def test_a_device_that_fails_says_so(tmp_path: Path) -> None:
    speed = measure_speed(stand_in(tmp_path, 'echo "RuntimeError: out of memory" >&2; exit 1'), "cuda:0")
    assert (speed.matmul_tflops, speed.error) == (None, "RuntimeError: out of memory")


def test_cards_are_numbered_by_bus_while_they_are_measured(tmp_path: Path) -> None:
    speed = measure_speed(stand_in(tmp_path, 'echo "$CUDA_DEVICE_ORDER" >&2; exit 1'), "cuda:0")
    assert speed.error == "PCI_BUS_ID"


def test_only_cards_with_code_in_the_build_are_measured(tmp_path: Path) -> None:
    facts = Facts(host=Host(system="Linux", architecture="x86_64"), gpus=(card(0), card(1, "6.1")))
    assert usable_cards(facts, stand_in(tmp_path, "true")) == (facts.gpus[0],)


def test_a_card_that_torch_does_not_see_is_not_measured(tmp_path: Path) -> None:
    facts = Facts(host=Host(system="Linux", architecture="x86_64"), gpus=(card(0), card(1)))
    build = replace(stand_in(tmp_path, "true"), num_devices=1)
    assert usable_cards(facts, build) == (facts.gpus[0],)


def test_without_a_torch_nothing_is_measured() -> None:
    facts = Facts(host=Host(system="Linux", architecture="x86_64"))
    broken = TorchBuild(interpreter="/opt/env/bin/python", origin="PATH", error="ImportError")
    assert with_probes(facts) == facts
    assert with_probes(replace(facts, torches=(broken,))).speeds == ()


def test_the_processor_and_each_card_are_measured(tmp_path: Path) -> None:
    body = """case "$1" in
*speed.py) echo '{"matmul_tflops": 2.0, "memory_gb_per_s": 3.0}' ;;
*) echo '{"outcome": "ok", "detail": null}' ;;
esac"""
    facts = Facts(
        host=Host(system="Linux", architecture="x86_64"),
        gpus=(card(0), card(1)),
        torches=(stand_in(tmp_path, body),),
    )
    measured = with_probes(facts)
    assert [speed.device for speed in measured.speeds] == ["cpu", "cuda:0", "cuda:1"]
    assert [item.backend for item in measured.reductions] == ["gloo", "nccl"]
