"""The public surface: what `outrider` exports, and that options, builder and `train()` speak of the same things."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.api.ddp_builder import DdpBuilder
from outrider.api.options import Options, SessionOptions
from outrider.api.wrap import Wrapped
from outrider.record.run_config import RunConfig
from outrider.replica.recipe import Recipe

SURFACE = [
    "Advice",
    "ConfigError",
    "DataError",
    "Ddp",
    "DeviceError",
    "DeviceSpeed",
    "EpochContext",
    "EpochMetrics",
    "Flow",
    "LabRun",
    "Network",
    "Outcome",
    "Outer",
    "OutriderError",
    "PeerLostError",
    "Run",
    "Scenario",
    "Session",
    "StepError",
    "Trained",
    "VerifyError",
    "WaitError",
    "__version__",
    "advise",
    "lab",
    "log",
    "replay",
    "setup",
    "simulate",
    "train",
    "wrap",
]
REQUIRED = {"model", "optimizer", "step", "dataset"}
OF_THE_LOOP = [
    "backend",
    "backward",
    "batch_samples",
    "batches",
    "close",
    "device",
    "devices",
    "ema",
    "epochs",
    "evaluate",
    "evaluate_together",
    "gather",
    "global_step",
    "is_main",
    "load_state_dict",
    "log",
    "metrics",
    "no_sync",
    "open",
    "optimizer",
    "optimizer_step",
    "prepare",
    "progress",
    "rank",
    "run_dir",
    "samples_seen",
    "save",
    "state_dict",
    "step",
    "world",
    "world_size",
]
WRAPPED = ["average_buffers", "average_gradients", "average_parameters", "broadcast", "close", "module", "session"]
# Not options: the data set is required, num_epochs is another word for epochs, run() starts.
OTHER_METHODS = {"dataset", "num_epochs", "run"}


def methods() -> set[str]:
    return {name for name in vars(DdpBuilder) if not name.startswith("_")}


def test_the_surface_is_what_it_was() -> None:
    assert sorted(outrider.__all__) == sorted(SURFACE)


def test_dir_shows_the_surface_and_nothing_else() -> None:
    assert dir(outrider) == sorted(outrider.__all__)


@pytest.mark.parametrize("name", SURFACE)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(outrider, name) is not None


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'outrider' has no attribute 'trian'$"):
        _ = outrider.trian


def test_importing_outrider_does_not_import_torch() -> None:
    code = "import sys, outrider; dir(outrider); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "False\n"


def test_the_simulator_does_not_import_torch() -> None:
    code = """
import sys, outrider
scenario = outrider.Scenario.from_speeds((1.0, 0.4), batches=20)
print(outrider.simulate("sync", scenario).averages, "torch" in sys.modules, "numpy" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "20 False False\n"


def test_without_torch_the_error_names_the_way_out() -> None:
    code = """
import sys
sys.modules["torch"] = None
import outrider
try:
    outrider.train
except outrider.ConfigError as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == (
        "outrider.train needs torch, and no torch is installed\n"
        "hint: `outrider setup` installs the build that fits this machine, pip install 'outrider[torch]' a default\n"
    )


def test_every_error_is_an_outrider_error() -> None:
    exported = [getattr(outrider, name) for name in SURFACE if name.endswith("Error")]
    assert all(issubclass(error, outrider.OutriderError) for error in exported)


def test_every_option_has_a_builder_method_of_its_name_and_the_other_way_round() -> None:
    assert methods() - OTHER_METHODS == set(Options.__annotations__)


def test_every_option_is_a_field_of_the_recipe_or_of_the_run() -> None:
    known = {field.name for kind in (Recipe, RunConfig) for field in fields(kind)}
    assert known - REQUIRED == set(Options.__annotations__)


def test_every_builder_method_is_described() -> None:
    assert [name for name in sorted(methods()) if not inspect.getdoc(getattr(DdpBuilder, name))] == []


def test_an_option_of_a_session_is_that_of_train() -> None:
    shared = {name: Options.__annotations__[name] for name in SessionOptions.__annotations__}
    assert shared == SessionOptions.__annotations__


def test_a_session_has_the_names_that_it_had() -> None:
    assert [name for name in dir(outrider.Session()) if not name.startswith("_")] == OF_THE_LOOP


def test_every_name_of_a_session_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "session.md").read_text()
    assert [name for name in OF_THE_LOOP if f"s.{name}" not in guide] == []


def test_averages_by_hand_have_the_names_that_they_had(tmp_path: Path) -> None:
    with outrider.wrap(torch.nn.Linear(1, 1), devices="cpu", run_dir=tmp_path) as wrapped:
        assert [name for name in dir(wrapped) if not name.startswith("_")] == WRAPPED


@pytest.mark.parametrize("kind", [outrider.Session, Wrapped])
def test_every_method_of_a_users_loop_is_described(kind: type) -> None:
    described = {name for name, part in vars(kind).items() if callable(part) and inspect.getdoc(part)}
    assert {name for name, part in vars(kind).items() if callable(part) and not name.startswith("_")} <= described


@pytest.mark.parametrize("name", sorted(Options.__annotations__))
def test_a_builder_method_sets_the_option_of_its_name(name: str) -> None:
    value = object()
    builder = getattr(outrider.Ddp.builder(_nothing, _nothing, _nothing), name)(value)
    assert builder._options == {name: value}


def test_a_half_built_run_can_be_shared() -> None:
    base = outrider.Ddp.builder(_nothing, _nothing, _nothing).batch_size(8)
    base.batch_size(16)
    assert base._options == {"batch_size": 8}


def _nothing(*_: Any) -> Any:
    return None
