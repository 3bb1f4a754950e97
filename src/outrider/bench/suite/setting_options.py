"""Options of `train()` on the command line: `--set name=value` is converted to the type of the option.

Decides which options a benchmark leaves to the user and how their values are written. The recipe checks the values
before anything is started. Called by `bench run` and `bench sweep`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from collections.abc import Sequence as AbstractSequence
from typing import Any, Literal, Union, get_args, get_origin

from outrider.api.option_table import COMMAND_LINE_OPTIONS, OPTIONS
from outrider.api.options import make_order
from outrider.errors import ConfigError, did_you_mean
from outrider.policy.policies import OUTER_STEP_POLICIES

OWN = {
    "batch_size": "--batch-size",
    "epochs": "--epochs",
    "seed": "--seeds",
    "devices": "--devices",
    "policy": "--mode",
    "backend": "--mode",
    "run_dir": "--output",
}
"""Options that the benchmark decides itself, and the command-line option for each."""
PER_WORLD = frozenset({"shares", "speed_hints"})
"""Always one value per rank."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
_FLAGS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def is_per_rank(name: str, value: Any) -> bool:
    """Whether an option has one value per rank, of no use to a device alone."""
    return name in PER_WORLD or (name == "micro_batch" and isinstance(value, list | tuple))


def parse_settings(texts: Sequence[str], *, num_devices: int) -> dict[str, Any]:
    """The options that were set, checked as `train()` would."""
    settings = dict(_parse(text) for text in texts)
    _check(settings, num_devices=num_devices)
    return settings


def _parse(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise ConfigError(f"--set takes name=value, got {text!r}", hint="for example --set overhead_target=0.05")
    name = name.strip()
    if name in OWN:
        raise ConfigError(f"--set cannot change {name!r}: the benchmark decides it", hint=f"use {OWN[name]}")
    if name not in COMMAND_LINE_OPTIONS:
        hint = did_you_mean(name, COMMAND_LINE_OPTIONS, otherwise=f"options are {', '.join(COMMAND_LINE_OPTIONS)}")
        raise ConfigError(f"unknown option {name!r}", hint=hint)
    return name, _value(name, value.strip(), OPTIONS[name].type)


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
            (inner,) = get_args(kind)
            return [_value("an item", part.strip(), inner) for part in text.split(",")]
        return kind(text)
    except (ValueError, ConfigError):
        return _NO


def _word(kind: Any) -> str:
    if _is_literal(kind):
        return ", ".join(get_args(kind))
    return _WORDS.get(kind, "numbers with commas" if get_args(kind) == (float,) else "one per rank with commas")


def _check(settings: Mapping[str, Any], *, num_devices: int) -> None:
    """Check the values with the recipe before any process is started."""
    stand_ins = {"model": dict, "optimizer": dict, "step": dict, "dataset": ()}
    # A policy that takes every option: modes that take fewer say so themselves.
    if settings.get("precision", "fp32") not in ("fp32", "bf16"):
        raise ConfigError(
            f"benchmarks measure fp32 and bf16, got precision={settings['precision']}",
            hint="peers such as torch DDP run here without loss scaling; train() takes the other precisions",
        )
    order = make_order(stand_ins, {"batch_size": 2**30, "policy": OUTER_STEP_POLICIES[0], **settings})
    order.recipe.check_ranks(num_devices)
    order.recipe.planner_config(num_devices, batch_size=order.recipe.mean_batch_size)
