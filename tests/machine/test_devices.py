"""Device specs as users write them, what is there, and threads per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError, DeviceError
from outrider.machine import devices
from outrider.machine.devices import (
    DeviceSpec,
    cuda_devices,
    num_cores,
    parse_devices,
    resolve_devices,
    threads_alone,
    threads_per_rank,
    visible_cards,
)

EXAMPLES = "devices look like cuda:0, cpu, cpu@0.4 or cuda:0%30"


class FakeNvmlError(Exception):
    pass


def fake_nvml(*uuids: str) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: uuids[index],
    )


def broken_init() -> None:
    raise FakeNvmlError("driver not loaded")


@pytest.mark.parametrize(
    "text",
    [
        "cpu",
        "cpu@0.4",
        "cuda:0",
        "cuda:1%30",
        "xpu:0",
        "mps",
        "cuda:0:8GiB",
        "cuda:0%30:8GiB",
        "cpu:512MiB",
        "cpu@0.4:2GB",
    ],
)
def test_a_spec_reads_back_as_it_was_written(text: str) -> None:
    assert str(parse_devices(text)[0]) == text


@given(speed=st.integers(1, 99).map(lambda percent: percent / 100))
def test_any_throttled_cpu_reads_back_as_the_same_spec(speed: float) -> None:
    spec = DeviceSpec(kind="cpu", speed=speed)
    assert parse_devices(str(spec)) == (spec,)


def test_a_comma_list_gives_one_spec_per_rank_in_order() -> None:
    assert parse_devices("cuda:1, cpu@0.4") == (
        DeviceSpec(kind="cuda", index=1),
        DeviceSpec(kind="cpu", speed=0.4),
    )


def test_a_sequence_of_names_is_as_good_as_a_comma_list() -> None:
    assert parse_devices(["cpu", "cpu@0.5"]) == parse_devices("cpu,cpu@0.5")


def test_cuda_without_a_number_is_the_first_one() -> None:
    assert parse_devices("cuda") == (DeviceSpec(kind="cuda", index=0),)


def test_torch_name_leaves_speed_and_share_out() -> None:
    assert [spec.torch_name for spec in parse_devices("cpu@0.4,cuda:0%30")] == ["cpu", "cuda:0"]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("cudo:0", "unknown device kind 'cudo'", "did you mean cuda? kinds are cuda, cpu, xpu, mps"),
        ("gpu:0", "unknown device kind 'gpu'", "did you mean cuda? kinds are cuda, cpu, xpu, mps"),
        ("GPU", "unknown device kind 'GPU'", "did you mean cuda? kinds are cuda, cpu, xpu, mps"),
        ("banana", "unknown device kind 'banana'", "kinds are cuda, cpu, xpu, mps"),
        (
            "cpu@0",
            "the speed of a device must be in (0, 1], got cpu@0",
            "cpu@0.4 is a CPU rank at 40 % of its speed",
        ),
        (
            "cpu@1.5",
            "the speed of a device must be in (0, 1], got cpu@1.5",
            "cpu@0.4 is a CPU rank at 40 % of its speed",
        ),
        ("cpu@fast", "the speed of device 'cpu@fast' is no number: 'fast'", EXAMPLES),
        ("cuda:x", "the number of device 'cuda:x' is no number: 'x'", EXAMPLES),
        ("cuda:-1", "the number of a device must be 0 or more, got cuda:-1", EXAMPLES),
        ("cpu:1", "cpu takes no number, got cpu:1", "write cpu"),
        (
            "cuda:0@0.4",
            "only cpu can be throttled, got cuda:0@0.4",
            "take a slice of a CUDA device instead, as in cuda:0%40",
        ),
        ("cpu%30", "only cuda can be sliced, got cpu%30", "throttle a CPU rank instead, as in cpu@0.4"),
        (
            "cuda:0%0",
            "the share of a device must be 1 to 100 percent, got cuda:0%0",
            "cuda:0%30 is 30 % of the multiprocessors of cuda:0",
        ),
        ("", "devices is empty", f'pass devices="auto", or name them; {EXAMPLES}'),
        ("cpu,,cpu", "'' is no device", EXAMPLES),
        ("auto,cpu", "auto cannot stand beside other devices", 'pass devices="auto" alone'),
    ],
)
def test_a_device_that_cannot_work_is_refused_with_the_way_out(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_auto_takes_all_cuda_devices() -> None:
    resolved = resolve_devices("auto", cuda_devices=("cuda:0", "cuda:1"))
    assert resolved.devices == parse_devices("cuda:0,cuda:1")
    assert resolved.reason == "auto: 2 CUDA devices found by NVML"


def test_auto_takes_one_cpu_rank_where_there_is_no_cuda() -> None:
    resolved = resolve_devices("auto", cuda_devices=())
    assert resolved.devices == parse_devices("cpu")
    assert resolved.reason == "auto: no CUDA device found by NVML"


def test_devices_asked_for_are_taken_when_they_are_there() -> None:
    resolved = resolve_devices("cuda:0,cpu", cuda_devices=("cuda:0",))
    assert resolved.devices == parse_devices("cuda:0,cpu")
    assert resolved.reason == "asked for"


def test_specs_resolve_to_themselves() -> None:
    specs = parse_devices("cpu,cpu@0.4")
    assert resolve_devices(specs, cuda_devices=()).devices == specs


@pytest.mark.parametrize(
    ("asked", "found", "message", "way_out"),
    [
        ("cuda:0,cuda:1", ["cuda:0"], "2 CUDA devices asked for, 1 found (cuda:0, by NVML)", "cuda:0,cpu"),
        ("cuda:0", [], "1 CUDA device asked for, 0 found (by NVML)", "cpu"),
        ("cuda:3", ["cuda:0"], "cuda:3 asked for, 1 CUDA device found (cuda:0, by NVML)", "cpu"),
    ],
)
def test_cuda_devices_that_are_not_there_are_named(asked: str, found: list[str], message: str, way_out: str) -> None:
    with pytest.raises(DeviceError) as caught:
        resolve_devices(asked, cuda_devices=found)
    assert caught.value.message == message
    assert caught.value.hint == f'run `outrider diagnose`, or pass devices="{way_out}"'


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ({}, ("cuda:0", "cuda:1")),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ("cuda:0", "cuda:1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": "7"}, ()),
    ],
)
def test_cuda_devices_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, visible: dict[str, str], names: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("GPU-aa-1", "GPU-bb-2"))
    assert cuda_devices(visible) == names


def test_visible_devices_are_traced_back_to_their_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("GPU-aa-1", "GPU-bb-2"))
    assert visible_cards({}) == (0, 1)
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "GPU-bb,0,MIG-1234"}) == (1, 0, None)


def test_a_missing_driver_means_no_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml("GPU-aa-1")
    nvml.nvmlInit = broken_init
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert cuda_devices({}) == ()


def test_a_missing_nvml_library_means_no_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda_devices({}) == ()


@pytest.mark.parametrize(
    ("text", "cores", "threads"),
    [
        ("cpu", 8, (8,)),
        ("cpu,cpu@0.4", 2, (1, 1)),
        ("cpu,cpu", 5, (2, 2)),
        ("cuda:0,cpu", 8, (1, 7)),
        ("cuda:0,cuda:1", 8, (4, 4)),
        ("cpu,cpu,cpu", 2, (1, 1, 1)),
        ("cuda:0,cuda:1,cpu", 2, (1, 1, 1)),
    ],
)
def test_threads_follow_the_cores_that_are_there(text: str, cores: int, threads: tuple[int, ...]) -> None:
    assert threads_per_rank(parse_devices(text), cores) == threads


@given(
    kinds=st.lists(st.sampled_from(["cpu", "cuda:0", "cpu@0.4"]), min_size=1, max_size=16),
    cores=st.integers(1, 256),
)
def test_every_rank_has_a_thread_and_cores_are_not_fought_for(kinds: list[str], cores: int) -> None:
    threads = threads_per_rank(parse_devices(kinds), cores)
    assert min(threads) >= 1
    assert sum(threads) <= max(cores, len(kinds))


@pytest.mark.parametrize(("text", "cores"), [("200000 100000\n", 2), ("max 100000\n", None), ("odd\n", None)])
def test_the_quota_of_a_container_is_read_in_whole_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert devices._container_quota(tmp_path / "cpu.max") == cores


def test_at_least_one_core_is_there() -> None:
    assert num_cores() >= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda:0:8GiB", DeviceSpec(kind="cuda", index=0, memory_bytes=8 * 2**30)),
        ("cuda:8gib", DeviceSpec(kind="cuda", index=0, memory_bytes=8 * 2**30)),
        ("cuda:1%30:1.5GiB", DeviceSpec(kind="cuda", index=1, share=30, memory_bytes=3 * 2**29)),
        ("cpu@0.5:512MB", DeviceSpec(kind="cpu", speed=0.5, memory_bytes=512 * 10**6)),
    ],
)
def test_a_spec_may_have_a_limit_of_memory(text: str, expected: DeviceSpec) -> None:
    assert parse_devices(text) == (expected,)
    assert parse_devices(str(expected)) == (expected,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:0:8", "the memory of device 'cuda:0:8' is no size: '8'"),
        ("cuda:0%30:lots", "the memory of device 'cuda:0%30:lots' is no size: 'lots'"),
        ("cpu:0GiB", "the memory of a device must be more than 0, got cpu:0GiB"),
        ("mps:8GiB", "the memory of mps devices cannot be limited, got mps:8GiB"),
    ],
)
def test_limits_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("text", "cores", "threads"),
    [
        ("cpu,cpu@0.5", 2, (2, 2)),
        ("cpu", 4, (4,)),
        ("cuda:0,cpu,cpu", 8, (1, 7, 7)),
        ("cuda:0,cuda:1", 8, (4, 4)),
        ("cpu,cpu,cpu", 2, (2, 2, 2)),
        ("cuda:0,cpu", 1, (1, 1)),
    ],
)
def test_while_others_rest_a_cpu_rank_has_the_cores_of_all_cpu_ranks(
    text: str, cores: int, threads: tuple[int, ...]
) -> None:
    assert threads_alone(parse_devices(text), cores) == threads
