"""Turns frozen dataclasses into JSON and back, and names the place of every mistake in a file.

Does not interpret the data. Called by `machine_facts`, `wheels` and `variants` for their files.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import DataError, nearest

Record = TypeVar("Record")


def encode(record: Any) -> Any:
    """Plain JSON values of a dataclass, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(record)))


def decode(kind: type[Record], data: Any, *, where: str = "file") -> Record:
    """A `kind` from plain JSON values; `where` names the place in errors."""
    return typing.cast(Record, _decode(kind, data, where))


def read(kind: type[Record], path: Path) -> Record:
    """A `kind` from a JSON file."""
    return decode(kind, read_json(path), where=path.name)


def read_json(path: Path) -> Any:
    """The plain JSON values of a file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="check the path and its permissions"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", hint="a file written by outrider was expected") from error


def write(record: Any, path: Path) -> None:
    """Write JSON beside `path` and rename, so that a reader never sees half a file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(encode(record), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if origin in (types.UnionType, typing.Union):
        return _decode_optional(kind, data, where)
    if origin is tuple:
        (item, _) = typing.get_args(kind)
        return tuple(_decode(item, value, f"{where}[{i}]") for i, value in enumerate(_expect(list, data, where)))
    if origin is dict:
        (_, item) = typing.get_args(kind)
        return {key: _decode(item, value, f"{where}.{key}") for key, value in _expect(dict, data, where).items()}
    if origin is typing.Literal:
        return _decode_literal(kind, data, where)
    if kind is float and type(data) is int:
        return float(data)
    return _expect(kind, data, where)


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    values = _expect(dict, data, where)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            closest = nearest(key, fields)
            raise DataError(f"{where}: unknown key {key!r}", hint=f"did you mean {closest!r}?" if closest else None)
    missing = [name for name, field in fields.items() if name not in values and _is_required(field)]
    if missing:
        raise DataError(f"{where}: missing {', '.join(missing)}", hint="the file may come from another version")
    hints = typing.get_type_hints(kind)
    return kind(**{key: _decode(hints[key], value, f"{where}.{key}") for key, value in values.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _decode_optional(kind: Any, data: Any, where: str) -> Any:
    if data is None:
        return None
    (inner,) = [item for item in typing.get_args(kind) if item is not type(None)]
    return _decode(inner, data, where)


def _decode_literal(kind: Any, data: Any, where: str) -> Any:
    choices = typing.get_args(kind)
    if data not in choices:
        raise DataError(f"{where}: expected one of {', '.join(map(repr, choices))}, got {data!r}")
    return data


def _expect(kind: type, data: Any, where: str) -> Any:
    # bool is an int to Python, and a count of True would pass unnoticed.
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise DataError(f"{where}: expected {kind.__name__}, got {data!r}")
    return data
