"""Real ranks in real processes: what they find, what they tell, and every way they end.

The targets import no torch, so a rank costs a fraction of a second. All of it holds for ranks in fresh processes and
for ranks that are forked from a forkserver.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, OutriderError, PeerLostError, StepError, WaitError
from outrider.launch.launcher import Ranks, launch
from outrider.machine.devices import parse_devices
from outrider.world.messages import Link, Message

TWO = parse_devices("cpu,cpu@0.4")
FOREVER_S = 600
WaitUntilGone = Callable[[list[int]], None]


Start = Callable[..., Ranks]


@pytest.fixture(scope="module", params=[(), ("wave",)], ids=["fresh", "forked"])
def imports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture
def start(imports: tuple[str, ...]) -> Start:
    def start(target: Callable[..., None], log_dir: Path, **payload: object) -> Ranks:
        return launch(target, payload, devices=TWO, log_dir=log_dir, imports=imports)

    return start


def outcome(ranks: Ranks) -> list[Message]:
    """All messages of a run that ends well, by rank."""
    with ranks:
        messages = list(ranks.messages())
        ranks.raise_error()
    return sorted(messages, key=lambda message: message.rank)


def failure(ranks: Ranks) -> OutriderError:
    with ranks:
        list(ranks.messages())
        with pytest.raises(OutriderError) as caught:
            ranks.raise_error()
    return caught.value


# Targets, as a user would write them in a module.


def tell_surroundings(link: Link, greeting: str) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EXTRA")
    print(f"{greeting} from rank {link.rank}")
    link.send(
        "surroundings",
        variables={name: os.environ.get(name) for name in names},
        device=str(link.spec),
        num_threads=link.num_threads,
        folder=os.getcwd(),
        has_torch="torch" in sys.modules,
    )


def hang(link: Link) -> None:
    link.send("pid", pid=os.getpid())
    time.sleep(FOREVER_S)


def ignore_sigterm_and_hang(link: Link) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(link)


def wait_for_stop(link: Link) -> None:
    link.send("ready")
    link.send("stopped", was_asked=link.stop_requested.wait(FOREVER_S))


def fail_in_rank_1(link: Link) -> None:
    if link.rank == 1:
        raise ValueError("loss went wrong")
    time.sleep(FOREVER_S)


def lose_peer_first(link: Link, started: str) -> None:
    """Rank 0 notices the trouble before rank 1, which is its cause, can tell."""
    if link.rank == 0:
        # A rank can be lost only once it is there, which takes its time on a busy machine.
        while not os.path.exists(started):
            time.sleep(0.01)
        raise PeerLostError("rank 1 went away")
    Path(started).touch()
    time.sleep(0.5)
    raise ConfigError("rank 1 cannot go on", hint="give it what it needs", step=3)


def kill_rank_1(link: Link) -> None:
    if link.rank == 1:
        print("about to vanish")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def exit_quietly_in_rank_1(link: Link) -> None:
    if link.rank == 1:
        os._exit(0)
    time.sleep(FOREVER_S)


def leave_a_helper_and_die(link: Link) -> None:
    helper = subprocess.Popen(["sleep", str(FOREVER_S)])
    link.send("helper", pid=helper.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def tell_much(link: Link) -> None:
    for number in range(200):
        link.send("number", number=number, ballast="x" * 2_000)


# What a rank finds.


@pytest.fixture(scope="module")
def surroundings(imports: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log_dir = tmp_path_factory.mktemp("logs") / "deep"
    messages = outcome(
        launch(
            tell_surroundings,
            {"greeting": "good day"},
            devices=TWO,
            log_dir=log_dir,
            environment={"EXTRA": "yes"},
            imports=imports,
        )
    )
    return {"fields": [message.fields for message in messages], "log_dir": log_dir}


def test_every_rank_finds_the_variables_of_torchrun(surroundings: dict[str, Any]) -> None:
    assert [fields["variables"] for fields in surroundings["fields"]] == [
        {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "EXTRA": "yes",
        }
        for rank in ("0", "1")
    ]


def test_every_rank_knows_its_device_and_has_a_thread(surroundings: dict[str, Any]) -> None:
    assert [fields["device"] for fields in surroundings["fields"]] == ["cpu", "cpu@0.4"]
    assert all(fields["num_threads"] >= 1 for fields in surroundings["fields"])


def test_ranks_work_in_the_folder_of_their_starter(surroundings: dict[str, Any]) -> None:
    assert [fields["folder"] for fields in surroundings["fields"]] == [os.getcwd()] * 2


def test_a_rank_imports_no_torch_by_itself(surroundings: dict[str, Any]) -> None:
    assert not any(fields["has_torch"] for fields in surroundings["fields"])


def test_what_a_rank_prints_is_in_its_log(surroundings: dict[str, Any]) -> None:
    assert (surroundings["log_dir"] / "rank1.log").read_text() == "good day from rank 1\n"


def test_many_messages_arrive_whole_and_in_order_although_nobody_listens_at_first(start: Start, tmp_path: Path) -> None:
    with start(tell_much, tmp_path) as ranks:
        ranks.wait(timeout_s=60)
        numbers = [message.fields["number"] for message in ranks.messages() if message.rank == 1]
    assert numbers == list(range(200))


# What can be sent.


def test_a_closure_with_what_it_holds_can_be_a_target(start: Start, tmp_path: Path) -> None:
    factor = 3

    def multiply(link: Link, number: int) -> None:
        link.send("product", value=number * factor)

    messages = outcome(start(multiply, tmp_path, number=7))
    assert [message.fields["value"] for message in messages] == [21, 21]


def test_what_two_options_share_stays_shared(start: Start, tmp_path: Path) -> None:
    shared = [1, 2]

    def compare(link: Link, first: list[int], second: list[int]) -> None:
        link.send("compared", is_same=first is second)

    messages = outcome(start(compare, tmp_path, first=shared, second=shared))
    assert all(message.fields["is_same"] for message in messages)


def test_the_option_that_cannot_be_sent_is_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        start(hang, tmp_path, model=3, dataset=[threading.Lock()])
    assert caught.value.message == "dataset cannot be sent to the ranks: cannot pickle '_thread.lock' object"
    assert caught.value.hint == "pass a function that makes it, or open files and locks inside the rank"


def test_the_payload_is_private_and_gone_once_all_ranks_have_read_it(start: Start, tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob(f"outrider-{os.getpid()}-*"))
    with start(wait_for_stop, tmp_path) as ranks:
        made = set(Path(tempfile.gettempdir()).glob(f"outrider-{os.getpid()}-*")) - before
        (folder,) = [path for path in made if "-store-" not in path.name]
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "payload")]
        messages = [ranks.next_message(60), ranks.next_message(60)]
        is_there = folder.exists()
    assert modes == [0o700, 0o600]
    assert [message.kind for message in messages if message] == ["ready", "ready"]
    assert not is_there


# How ranks end.


def test_a_polite_stop_reaches_every_rank(start: Start, tmp_path: Path) -> None:
    with start(wait_for_stop, tmp_path) as ranks:
        assert ranks.next_message(60)
        ranks.stop()
        kinds = sorted(message.kind for message in ranks.messages())
        ranks.raise_error()
    assert kinds == ["ready", "stopped", "stopped"]


def test_the_exception_of_one_rank_arrives_while_the_other_hangs(start: Start, tmp_path: Path) -> None:
    error = failure(start(fail_in_rank_1, tmp_path))
    assert isinstance(error, StepError)
    assert error.message == "rank 1 (cpu@0.4): ValueError: loss went wrong"
    assert error.rank == 1
    assert error.traceback is not None
    assert "in fail_in_rank_1" in error.traceback
    assert "child.py" not in error.traceback


def test_a_lost_peer_is_never_reported_before_the_cause(start: Start, tmp_path: Path) -> None:
    error = failure(start(lose_peer_first, tmp_path, started=str(tmp_path / "started")))
    assert isinstance(error, ConfigError)
    assert (error.message, error.hint) == ("rank 1 cannot go on", "give it what it needs")
    assert (error.rank, error.step) == (1, 3)


def test_a_rank_that_is_killed_is_reported_with_its_last_log_lines(start: Start, tmp_path: Path) -> None:
    error = failure(start(kill_rank_1, tmp_path))
    assert error.message == "rank 1 (cpu@0.4) died with signal 9 (SIGKILL)"
    assert error.hint == f"see {tmp_path / 'rank1.log'}; a system out of memory ends processes this way"
    assert error.traceback == "about to vanish"
    assert error.rank == 1


def test_a_rank_that_exits_without_a_word_has_failed_whatever_its_code(start: Start, tmp_path: Path) -> None:
    error = failure(start(exit_quietly_in_rank_1, tmp_path))
    assert error.message == "rank 1 (cpu@0.4) ended with exit code 0 before it was done"


def test_what_a_dead_rank_started_is_ended_with_it(
    start: Start, tmp_path: Path, wait_until_gone: WaitUntilGone
) -> None:
    with start(leave_a_helper_and_die, tmp_path) as ranks:
        pids = [message.fields["pid"] for message in ranks.messages()]
    assert len(pids) == 2
    wait_until_gone(pids)


def test_leaving_the_block_ends_ranks_that_ignore_sigterm(start: Start, tmp_path: Path) -> None:
    with start(ignore_sigterm_and_hang, tmp_path) as ranks:
        assert ranks.next_message(60)
        assert ranks.next_message(60)
    assert not ranks.is_running


def test_ranks_that_were_ended_on_purpose_have_not_failed(start: Start, tmp_path: Path) -> None:
    with start(hang, tmp_path) as ranks:
        ranks.terminate()
        ranks.raise_error()
    assert not ranks.is_running


def test_a_wait_that_is_too_short_names_the_ranks_that_still_run(start: Start, tmp_path: Path) -> None:
    with start(hang, tmp_path) as ranks, pytest.raises(WaitError) as caught:
        ranks.wait(timeout_s=0.01)
    assert caught.value.message == "rank 0 (cpu), rank 1 (cpu@0.4) did not end within 0.01 s"
    assert caught.value.hint == "call stop() or terminate()"


def test_no_message_in_time_is_none_while_the_ranks_go_on(start: Start, tmp_path: Path) -> None:
    with start(wait_for_stop, tmp_path) as ranks:
        assert ranks.next_message(60)
        assert ranks.next_message(60)
        assert ranks.next_message(0.01) is None
        assert ranks.is_running


# Starts that cannot work.


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            launch(hang, {}, devices=TWO, log_dir=tmp_path, port=port)
    assert caught.value.message == f"port {port} on 127.0.0.1 is in use"
    assert caught.value.hint == "leave port out and a free one is taken"


def test_a_log_folder_that_cannot_be_made_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        start(hang, tmp_path / "file" / "logs")
    assert caught.value.message == f"log {tmp_path}/file/logs/rank0.log cannot be written: Not a directory"
    assert caught.value.hint == "pass a run_dir on a disk with room where you may write"


def test_an_interpreter_that_is_not_there_ends_the_rank_that_was_started_before_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(hang, {}, devices=TWO, log_dir=tmp_path, interpreters=[sys.executable, "/nowhere/python"])
    assert caught.value.message == "rank 1 cannot be started with /nowhere/python: No such file or directory"
    assert caught.value.hint == "give the path of a Python that has outrider installed"


def test_interpreters_must_match_the_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(hang, {}, devices=TWO, log_dir=tmp_path, interpreters=[sys.executable])
    assert caught.value.message == "1 interpreters given for 2 devices"
    assert caught.value.hint == "give one interpreter per device, or leave interpreters out"


def test_ranks_cannot_start_ranks(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OUTRIDER_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError) as caught:
        start(hang, tmp_path)
    assert caught.value.message == "ranks cannot be started from inside rank 1"
