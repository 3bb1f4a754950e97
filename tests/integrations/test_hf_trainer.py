"""The Trainer of transformers in a session, on ranks of unequal speed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.hf_ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from outrider.errors import ConfigError
from outrider.integrations.hf_arguments import refuse_arguments, refuse_device
from outrider.integrations.hf_batches import StepLoader
from outrider.integrations.hf_evaluation import can_share
from outrider.integrations.hf_place import check_place, place_after
from outrider.integrations.hf_steps import StepCount

UNEQUAL = "cpu,cpu@0.4"


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def plain(plain_folder: Path) -> dict[str, Any]:
    """The Trainer of transformers alone, on one device."""
    return run_ranks("train", folder=plain_folder, policy=None)[0]


@pytest.fixture(scope="module")
def balanced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balanced")


@pytest.fixture(scope="module")
def balanced(balanced_folder: Path) -> list[dict[str, Any]]:
    """In a session on two unequal devices."""
    return run_ranks("train", folder=balanced_folder, devices=UNEQUAL, policy="balanced")


def numbers(logs: list[dict[str, float]]) -> list[float]:
    return [value for log in logs for name, value in sorted(log.items()) if name != "total_flos"]


def test_balanced_ranks_end_with_the_weights_of_one_plain_trainer(
    plain: dict[str, Any], balanced: list[dict[str, Any]]
) -> None:
    assert balanced[0]["weights"] == balanced[1]["weights"]
    assert balanced[0]["weights"] == pytest.approx(plain["weights"], abs=1e-3)


def test_balanced_ranks_log_what_one_plain_trainer_logs(plain: dict[str, Any], balanced: list[dict[str, Any]]) -> None:
    assert [sorted(log) for log in balanced[0]["logs"]] == [sorted(log) for log in plain["logs"]]
    assert numbers(balanced[0]["logs"]) == pytest.approx(numbers(plain["logs"]), rel=1e-3)
    assert balanced[1]["logs"] == balanced[0]["logs"]
    assert balanced[0]["tokens"] == plain["tokens"]


def test_only_rank_zero_writes_and_nothing_is_wrapped(balanced: list[dict[str, Any]], balanced_folder: Path) -> None:
    names = {path.name for path in (balanced_folder / "out" / "checkpoint-4").iterdir()}
    assert names >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "outrider.json"}
    assert {name for name in names if name.startswith("rng")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert (balanced_folder / "final" / "model.safetensors").exists()
    assert not any(rank["is_wrapped"] for rank in balanced)


@pytest.mark.parametrize(("devices", "step"), [("cpu", 4), ("cpu,cpu,cpu@0.4", 8)])
def test_a_checkpoint_of_two_ranks_goes_on_with_other_numbers_of_ranks(
    devices: str,
    step: int,
    plain: dict[str, Any],
    balanced: list[dict[str, Any]],
    balanced_folder: Path,
    tmp_path: Path,
) -> None:
    checkpoint = str(balanced_folder / "out" / f"checkpoint-{step}")
    resumed = run_ranks("train", folder=tmp_path, devices=devices, policy="balanced", resume=checkpoint)
    assert resumed[0]["steps"] == list(range(step + 1, 13))
    assert resumed[0]["weights"] == pytest.approx(plain["weights"], abs=1e-3)
    assert resumed[-1]["weights"] == resumed[0]["weights"]


def test_a_checkpoint_of_the_plain_trainer_goes_on_in_a_session(
    plain: dict[str, Any], plain_folder: Path, tmp_path: Path
) -> None:
    checkpoint = str(plain_folder / "out" / "checkpoint-8")
    resumed = run_ranks("train", folder=tmp_path, devices=UNEQUAL, policy="balanced", resume=checkpoint)
    assert resumed[0]["weights"] == pytest.approx(plain["weights"], abs=1e-3)


def test_sync_ranks_train_as_the_trainer_does_with_ddp(tmp_path: Path) -> None:
    ddp = run_ranks("train", folder=tmp_path / "ddp", devices="cpu,cpu", policy=None)
    sync = run_ranks("train", folder=tmp_path / "sync", devices="cpu,cpu", policy="sync")
    assert ddp[0]["is_wrapped"]
    assert sync[0]["steps"] == ddp[0]["steps"]
    assert sync[0]["rates"] == ddp[0]["rates"]
    assert sync[0]["weights"] == sync[1]["weights"]


def test_sync_ranks_learn_what_ddp_learns(tmp_path: Path) -> None:
    """In the order of the data, and before its end, where DDP repeats samples to give each rank as many."""
    options = {"train_sampling_strategy": "sequential", "max_steps": 2}
    ddp, sync = (
        run_ranks("train", folder=tmp_path / str(policy), devices="cpu,cpu", policy=policy, options=options)[0]
        for policy in (None, "sync")
    )
    assert ddp["is_wrapped"]
    assert sync["weights"] == pytest.approx(ddp["weights"], abs=1e-6)
    assert sync["train_loss"] == pytest.approx(ddp["train_loss"], abs=1e-5)
    assert sync["logs"][0] == pytest.approx(ddp["logs"][0], abs=1e-5)
    assert "gathers numbers of its own" not in (tmp_path / "sync" / "rank0.log").read_text(), "only subclasses do"


@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_local_steps_count_and_schedule_as_one_device(policy: str, plain: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_ranks("train", folder=tmp_path, devices=UNEQUAL, policy=policy)
    assert [rank["steps"] for rank in ranks] == [plain["steps"]] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["tokens"] == plain["tokens"]
    losses = [[log.get("loss") or log.get("eval_loss") for log in rank["logs"]] for rank in ranks]
    assert losses[0] == losses[1]
    assert [rank["last_rate"] for rank in ranks] == [plain["last_rate"]] * 2
    assert ranks[0]["rates"][-1] < max(plain["rates"]) / 2
    assert ranks[0]["evaluated"]["eval_loss"] < plain["logs"][2]["eval_loss"] + 0.05


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_a_callback_on_one_rank_ends_all_ranks(policy: str, tmp_path: Path) -> None:
    ranks = run_ranks("train", folder=tmp_path, devices=UNEQUAL, policy=policy, callback="impatient")
    assert 5 <= ranks[0]["global_step"] == ranks[1]["global_step"] < 12
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_early_stopping_ends_all_ranks_with_the_best_model(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "learning_rate": 0.5, "save_total_limit": 1, "num_train_epochs": 9}
    shared = {"devices": UNEQUAL, "policy": "balanced", "options": options, "callback": "early stopping"}
    ranks = run_ranks("train", folder=tmp_path, **shared)
    assert ranks[0]["global_step"] == ranks[1]["global_step"] < 54
    assert ranks[0]["best"] == ranks[1]["best"]
    assert ranks[0]["best"] is not None
    assert ranks[0]["weights"] == ranks[1]["weights"]
    best = min(log["eval_loss"] for log in ranks[0]["logs"] if "eval_loss" in log)
    assert ranks[1]["evaluated"]["eval_loss"] == pytest.approx(best, rel=1e-4)


def test_after_sigterm_the_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    ended = run_ranks(
        "train",
        folder=tmp_path / "first",
        devices=UNEQUAL,
        policy="cadence",
        options={"save_strategy": "no"},
        callback="terminating",
    )
    assert [rank["code"] for rank in ended] == [143, 143]
    last = ended[0]["steps"][-1]
    assert 5 <= last < 12
    checkpoint = tmp_path / "first" / "out" / f"checkpoint-{last}"
    resumed = run_ranks("train", folder=tmp_path / "second", policy="cadence", resume=str(checkpoint))
    assert resumed[0]["steps"] == list(range(last + 1, 13))


def test_samplers_steps_and_regularization_are_those_of_one_device(tmp_path: Path) -> None:
    options = {
        "train_sampling_strategy": "group_by_length",
        "max_steps": 7,
        "dataloader_drop_last": True,
        "data_seed": 5,
        "label_smoothing_factor": 0.1,
        "gradient_checkpointing": True,
        "bf16": True,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "lr_scheduler_type": "cosine",
        "save_only_model": True,
    }
    plain = run_ranks("train", folder=tmp_path / "plain", policy=None, options=options)[0]
    ranks = run_ranks("train", folder=tmp_path / "ranks", devices=UNEQUAL, policy="balanced", options=options)
    assert ranks[0]["steps"] == plain["steps"] == list(range(1, 8))
    assert ranks[0]["rates"] == pytest.approx(plain["rates"])
    assert ranks[0]["tokens"] == plain["tokens"]
    assert [log["epoch"] for log in ranks[0]["logs"]] == [log["epoch"] for log in plain["logs"]]
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_what_is_saved_is_loaded_again_and_a_second_train_goes_on_from_there(tmp_path: Path) -> None:
    told = run_ranks("reload", folder=tmp_path)[0]
    assert told["trained"]
    assert told["loaded"][0] == told["loaded"][1]
    assert told["again"] == 2
    assert told["went_on"]


def test_the_trainer_uses_a_session_that_is_open_and_leaves_it_open(tmp_path: Path) -> None:
    told = run_ranks("inside_a_session", folder=tmp_path, devices=UNEQUAL)
    assert [rank["is_mine"] for rank in told] == [True, True]
    assert told[0]["gathered"] == [2, 2]


def test_what_a_session_cannot_honour_is_refused_by_name(tmp_path: Path) -> None:
    told = run_ranks("refusals", folder=tmp_path)[0]
    for name, message in told.items():
        assert name in message, message


def test_a_checkpoint_with_steps_of_another_size_is_refused() -> None:
    place = place_after(
        8, count=StepCount(step_samples=8, steps_per_epoch=6), num_samples=44, remaining=lambda done: None
    )
    assert place["remaining"] == [[8, 36]]
    with pytest.raises(ConfigError, match="6 steps of 8 samples per epoch, this run 3 of 16"):
        check_place(place, StepCount(step_samples=16, steps_per_epoch=3))


def test_accumulation_over_batches_of_an_own_sampler_is_refused() -> None:
    class Bucketed(BatchSampler):
        pass

    data = TensorDataset(torch.zeros(8))
    loader = DataLoader(data, batch_sampler=Bucketed(SequentialSampler(data), 2, drop_last=False))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 with a batch sampler of its own"):
        StepLoader(loader, accumulation=2, num_parts=1, pins_memory=False)


@pytest.mark.parametrize("name", ["deepspeed", "parallelism_config", "ddp_backend"])
def test_arguments_for_other_ways_to_distribute_are_refused(name: str, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    refuse_arguments(args)
    setattr(args, name, "given")
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name} does not work"):
        refuse_arguments(args)


def test_the_cpu_is_refused_where_the_session_has_a_card(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    session: Any = SimpleNamespace(device=torch.device("cpu"), rank=1)
    refuse_device(args, session)
    session.device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match="use_cpu was given, but rank 1 trains on cuda:0"):
        refuse_device(args, session)


def test_a_seq2seq_trainer_learns_and_generates_as_it_does_alone(tmp_path: Path) -> None:
    alone = run_ranks("translate", folder=tmp_path / "plain", policy=None)[0]
    ranks = run_ranks("translate", folder=tmp_path / "ranks", devices=UNEQUAL, policy="balanced")
    assert ranks[0] == ranks[1]
    assert ranks[0]["weights"] == pytest.approx(alone["weights"], abs=1e-3)
    evaluated = [log for log in ranks[0]["logs"] if "eval_right" in log]
    assert [log["eval_count"] for log in evaluated] == [21, 21]
    assert numbers(ranks[0]["logs"]) == pytest.approx(numbers(alone["logs"]), rel=1e-2)


def test_every_rank_evaluates_everything_that_it_generates(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    for generates in (False, True):
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, predict_with_generate=generates
        )
        trainer = SimpleNamespace(args=_WorldOfTwo(args))
        assert can_share(trainer, loader) is not generates


class _WorldOfTwo:
    """Arguments as a rank of two sees them."""

    world_size = 2

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)
