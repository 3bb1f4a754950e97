"""Messages and errors on their way from a rank to its starter, without processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistNetworkError

from outrider.errors import ConfigError, OutriderError, PeerLostError, StepError, WaitError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.world.environment import Environment
from outrider.world.messages import Message, adopted_link, decode, encode
from outrider.world.rank_errors import describe_error, rebuild_error

(SPEC,) = parse_devices("cpu@0.4")
HERE = Environment(rank=1, local_rank=1, world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=29500)


def users_loss() -> None:
    raise ValueError("loss went wrong")


def raised_by(action: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        action()
    return caught.value


def wrapped_as_step_error() -> None:
    try:
        users_loss()
    except ValueError as error:
        raise StepError("step 12 of rank 1 failed: loss went wrong", step=12) from error


def travel(error: BaseException) -> OutriderError:
    """The error as the starter gets it, through JSON."""
    return rebuild_error(json.loads(json.dumps(describe_error(error, rank=1, spec=SPEC))))


@given(
    kind=st.text(min_size=1),
    fields=st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none(), st.lists(st.booleans()))),
)
def test_a_message_survives_the_journey_on_one_line(kind: str, fields: dict[str, Any]) -> None:
    message = Message(rank=3, kind=kind, fields=fields)
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line, rank=3) == message


FAULT = "CUDA error: an illegal memory access was encountered\nFor debugging consider passing this and that\n"


@pytest.mark.parametrize(
    ("share", "hint"),
    [
        (None, "with CUDA_LAUNCH_BLOCKING=1 the traceback shows the operation at fault"),
        (
            30,
            "with CUDA_LAUNCH_BLOCKING=1 the traceback shows the operation at fault; "
            "a fault ends all runs of its MPS daemon, so look at the first that failed",
        ),
    ],
    ids=["whole GPU", "slice"],
)
def test_a_fault_on_a_gpu_is_told_in_one_line_with_the_way_out(share: int | None, hint: str) -> None:
    spec = DeviceSpec(kind="cuda", index=0, share=share)
    fields = describe_error(RuntimeError(FAULT), rank=1, spec=spec, step=7)
    words = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (fields["message"], fields["hint"]) == (f"rank 1 ({spec}), step 7: {words}", hint)


def test_an_exception_of_the_user_becomes_a_step_error_with_rank_and_traceback() -> None:
    error = travel(raised_by(users_loss))
    assert isinstance(error, StepError)
    assert error.message == "rank 1 (cpu@0.4): ValueError: loss went wrong"
    assert error.rank == 1
    assert error.traceback is not None
    assert "in users_loss" in error.traceback


def test_an_error_without_words_is_named_by_its_type() -> None:
    assert travel(KeyboardInterrupt()).message == "rank 1 (cpu@0.4): KeyboardInterrupt"


def test_our_errors_keep_type_hint_and_step() -> None:
    error = travel(ConfigError("anchor must be >= 1, got 0", hint="leave anchor out", step=7))
    assert isinstance(error, ConfigError)
    assert (error.message, error.hint, error.step, error.rank) == (
        "anchor must be >= 1, got 0",
        "leave anchor out",
        7,
        1,
    )


def test_a_rank_named_by_the_error_itself_is_kept() -> None:
    assert travel(WaitError("waited", rank=0)).rank == 0


def test_a_rank_that_waited_does_not_take_the_blame() -> None:
    assert travel(WaitError("waited")).rank is None


def test_a_network_error_of_torch_is_not_the_fault_of_the_users_step() -> None:
    assert isinstance(travel(DistNetworkError("the connection was reset")), PeerLostError)


def test_a_wrapped_error_shows_where_the_users_code_failed() -> None:
    error = travel(raised_by(wrapped_as_step_error))
    assert error.traceback is not None
    assert "in users_loss" in error.traceback
    assert "StepError" not in error.traceback


def test_frames_of_outrider_are_left_out_of_the_traceback() -> None:
    error = travel(raised_by(lambda: parse_devices("cudo")))
    assert error.traceback is not None
    assert "devices.py" not in error.traceback


def test_an_error_type_that_we_do_not_know_becomes_a_step_error() -> None:
    fields = describe_error(ConfigError("odd"), rank=1, spec=SPEC)
    assert type(rebuild_error({**fields, "type": "Sequence"})) is StepError


@pytest.mark.parametrize(
    "words",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234",
        "[gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1234: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_what_gloo_and_nccl_say_about_a_lost_peer_is_a_lost_peer(words: str) -> None:
    assert isinstance(travel(RuntimeError(words)), PeerLostError)


def test_a_link_under_torchrun_hands_its_messages_to_whoever_asked() -> None:
    heard: list[Message] = []
    link = adopted_link(HERE, devices=parse_devices("cpu,cpu@0.4"), on_message=heard.append)
    link.send("epoch", loss=0.5)
    assert heard == [Message(rank=1, kind="epoch", fields={"loss": 0.5})]


def test_a_link_under_torchrun_has_the_device_of_its_local_rank() -> None:
    link = adopted_link(HERE, devices=parse_devices("cpu,cpu@0.4"))
    link.send("epoch", loss=0.5)
    assert str(link.spec) == "cpu@0.4"
    assert not link.stop_requested.is_set()
