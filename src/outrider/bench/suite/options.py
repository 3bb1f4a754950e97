"""Options of the core on the command line: `--set name=value` becomes a value of the type that the option has.

Decides which options a benchmark leaves to the user and how their values are written; their meaning stays with the
core, which also checks them here before anything is started. Called by `bench run` and `bench sweep`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from collections.abc import Sequence as AbstractSequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outrider.api.options import Options, make_order
from outrider.errors import ConfigError, nearest
from outrider.replica import recipe as recipes
from outrider.runtime import config as configs

OWN = {
    "batch_size": "--batch-size",
    "epochs": "--epochs",
    "seed": "--seeds",
    "devices": "--devices",
    "policy": "--mode",
    "backend": "--mode",
    "run_dir": "--output",
}
"""What the benchmark decides, and the option that asks it to."""
_NEVER = frozenset({"resume", "port"})
PER_WORLD = frozenset({"shares", "speed_hints"})
"""One value per rank: of no use to a device alone."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
_FLAGS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def parse_settings(texts: Sequence[str], *, num_devices: int) -> dict[str, Any]:
    """The options that were set, checked as `train()` would."""
    settings = dict(_parse(text) for text in texts)
    _check(settings, num_devices=num_devices)
    return settings


def settable() -> list[str]:
    """Names that `--set` takes."""
    objects = recipes.OBJECTS | configs.OBJECTS
    return [name for name in Options.__annotations__ if name not in objects | _NEVER and name not in OWN]


def _parse(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise ConfigError(f"--set takes name=value, got {text!r}", hint="for example --set overhead_target=0.05")
    name = name.strip()
    if name in OWN:
        raise ConfigError(f"--set cannot change {name!r}: the benchmark decides it", hint=f"use {OWN[name]}")
    if name not in settable():
        close = nearest(name, settable())
        hint = f"did you mean {close!r}?" if close else f"options are {', '.join(settable())}"
        raise ConfigError(f"unknown option {name!r}", hint=hint)
    return name, _value(name, value.strip(), get_type_hints(Options)[name])


def _value(name: str, text: str, annotation: Any) -> Any:
    kinds = _kinds(annotation)
    for kind in kinds:
        found = _read(text, kind)
        if found is not _NO:
            return found
    expected = " or ".join(_word(kind) for kind in kinds)
    raise ConfigError(f"option {name!r} takes {expected}, got {text!r}", hint=f"write --set {name}=VALUE")


_NO = object()


def _kinds(annotation: Any) -> list[Any]:
    """The kinds of value of an annotation, the narrow ones first: 1 is a whole number before it is a number."""
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [kind for part in get_args(annotation) for kind in _kinds(part)]
    else:
        parts = [annotation]
    known = [part for part in parts if part in _WORDS or get_origin(part) in (Literal, AbstractSequence)]
    return sorted(known, key=lambda kind: not _is_literal(kind))


def _is_literal(kind: Any) -> bool:
    return bool(get_origin(kind) == Literal)


def _read(text: str, kind: Any) -> Any:
    if _is_literal(kind):
        return text if text in get_args(kind) else _NO
    if kind is type(None):
        return None if text.lower() == "none" else _NO
    if kind is bool:
        return _FLAGS.get(text.lower(), _NO)
    try:
        if get_origin(kind) is AbstractSequence:
            return [float(part) for part in text.split(",")]
        return kind(text)
    except ValueError:
        return _NO


def _word(kind: Any) -> str:
    if _is_literal(kind):
        return ", ".join(get_args(kind))
    return _WORDS.get(kind, "numbers with commas")


def _check(settings: Mapping[str, Any], *, num_devices: int) -> None:
    """Let the core look at the values before any process is started."""
    stand_ins = {"model": dict, "optimizer": dict, "step": dict, "dataset": ()}
    order = make_order(stand_ins, {"batch_size": 2**30, **settings})
    order.recipe.planner_config(num_devices)
