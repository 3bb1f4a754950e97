"""No process of ours runs bytes of another one: where the package may unpickle, checked in its source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "outrider"
MODULES = sorted(SOURCE.rglob("*.py"))
PICKLES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"})
OBJECTS = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)
MAY_PICKLE = {
    "launch/payload.py": "a rank reads the private file of its own starter",
    "bench/suite/workers.py": "a sweep and its own children, over an anonymous pipe",
}
MAY_RUN_CODE = {"flow/emit.py": "code that this process has written itself"}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def called(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_payload_of_the_own_starter_is_unpickled(path: Path) -> None:
    tree = ast.parse(path.read_text())
    used = imported(tree) & PICKLES
    assert not used or name_of(path) in MAY_PICKLE
    assert not {name for name, _ in called(tree) if name.rpartition(".")[2] in OBJECTS}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_tensors_are_loaded_as_weights_only_and_text_is_never_run(path: Path) -> None:
    for name, call in called(ast.parse(path.read_text())):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name != "torch.load" or options.get("weights_only") == "True"
        assert name not in ("np.load", "numpy.load") or options.get("allow_pickle") == "False"
        assert name not in ("eval", "exec") or name_of(path) in MAY_RUN_CODE
