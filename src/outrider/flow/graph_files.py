"""Saves a graph and loads it again, completely or in part.

Decides when two files are the same network: if the structures of their graphs, as lines of text, are equal. Called by
the graph.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import DataError
from outrider.flow.emit import Wired
from outrider.flow.freezing import module_at
from outrider.flow.wiring import Node


def structure_lines(graph: Wired) -> tuple[str, ...]:
    """One line for each node, with those of nested graphs and the tensors of each below it."""
    plan = graph.plan
    lines = [f"inputs {', '.join(plan.inputs)}"]
    for node in plan.nodes:
        lines.append(_node_line(node))
        module = getattr(graph, node.name, None)
        if isinstance(module, nn.Module):
            lines += [f"  {line}" for line in _module_lines(module, node.name)]
    return (*lines, f"outputs {', '.join(plan.outputs)}")


def structure_hash(graph: Wired) -> str:
    """A hash of the structure, 16 hexadecimal digits."""
    return hash_of(structure_lines(graph))


def hash_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def difference(in_file: Sequence[str], in_graph: Sequence[str], *, limit: int = 20) -> str:
    """The lines that only the file (-) or only the graph (+) has."""
    lines = difflib.unified_diff(in_file, in_graph, lineterm="", n=0)
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    shown = [f"  {line[0]} {line[1:].strip()}" for line in changed[:limit]]
    if len(changed) > limit:
        shown.append(f"  … and {len(changed) - limit} more lines")
    return "\n".join(shown)


def _node_line(node: Node) -> str:
    note = "".join(f" {text}" for text in (node.note, node.function) if text)
    dim = f" dim={node.dim}" if node.operation == "cat" else ""
    return f"{node.name}: {node.kind}{note}{dim} of {', '.join((*node.takes, *node.uses))}"


def _module_lines(module: nn.Module, path: str) -> list[str]:
    if isinstance(module, Wired):
        return [f"{path} Graph", *(f"  {line}" for line in structure_lines(module))]
    lines = [f"{path} {type(module).__name__}"]
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    lines += [f"{path}.{name} {_shape(tensor.shape)}" for name, tensor in tensors]
    for name, child in module.named_children():
        lines += _module_lines(child, f"{path}.{name}")
    return lines


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) for size in shape) or "scalar"


SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What became of a partial load; names are those of the graph, for skipped those of the file with the reason."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        counts = f"{len(self.loaded)} loaded, {len(self.missing)} missing, {len(self.skipped)} skipped"
        missing = [f"  missing {name}" for name in self.missing]
        skipped = [f"  skipped {name}: {reason}" for name, reason in self.skipped]
        return "\n".join([counts, *missing, *skipped])


def save(graph: Wired, path: Path) -> Path:
    """Write the tensors, with the structure beside them."""
    lines = structure_lines(graph)
    metadata = {
        "format": "pt",
        "schema_version": str(SCHEMA_VERSION),
        "structure_hash": hash_of(lines),
        "structure": json.dumps(lines),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(_unshared(graph), str(path), metadata)
    return path


def load(graph: Wired, path: Path) -> None:
    """Read a whole file; one of another structure is refused."""
    metadata, tensors = _read(path)
    if "structure_hash" not in metadata:
        raise DataError(
            f"{path} does not say which network it is of",
            hint="read it with load_part(), or with load_state_dict() if you know that it fits",
        )
    _require_same_structure(graph, path, metadata)
    with torch.no_grad():
        for name, tensor in _unshared(graph).items():
            tensor.copy_(tensors[name])


def load_part(graph: Wired, path: Path, *, into: str, source: str) -> LoadReport:
    """Read what fits by name and shape from below `source` in the file into the module at `into`."""
    target = _named_tensors(module_at(graph, into))
    _, tensors = _read(path)
    offered = _below(tensors, source)
    if not offered:
        tops = ", ".join(sorted({name.split(".")[0] for name in tensors}))
        raise DataError(f"{path} has nothing at path {source!r}", hint=f"the top of the file is {tops}")
    skipped = tuple(
        (_join(source, name), reason)
        for name, tensor in sorted(offered.items())
        if (reason := _misfit(tensor, target, name))
    )
    loaded = tuple(name for name in target if name in offered and _misfit(offered[name], target, name) is None)
    with torch.no_grad():
        for name in loaded:
            target[name].copy_(offered[name])
    return LoadReport(
        loaded=tuple(_join(into, name) for name in loaded),
        missing=tuple(_join(into, name) for name in _without_aliases(target, loaded)),
        skipped=skipped,
    )


def _require_same_structure(graph: Wired, path: Path, metadata: Mapping[str, str]) -> None:
    lines = structure_lines(graph)
    if metadata["structure_hash"] == hash_of(lines):
        return
    in_file = json.loads(metadata.get("structure", "[]"))
    raise DataError(
        f"{path} is of another network than {graph.plan.name!r}; - is the file, + is the graph:\n"
        f"{difference(in_file, lines)}",
        hint="build the graph that was saved, or read what fits with load_part()",
    )


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        return metadata, load_file(str(path))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", hint="check the path") from None
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file: {error}", hint="write it with save()") from error


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Everything a state_dict holds, as the tensors themselves."""
    return module.state_dict(keep_vars=True)


def _unshared(module: nn.Module) -> dict[str, Tensor]:
    """Each tensor once, under its first name, detached but sharing memory with the module."""
    first: dict[int, str] = {}
    named = _named_tensors(module)
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name].detach() for name in first.values()}


def _without_aliases(target: Mapping[str, Tensor], loaded: Iterable[str]) -> list[str]:
    """The names that were not loaded, under any of their names."""
    done = {id(target[name]) for name in loaded}
    return [name for name, tensor in target.items() if id(tensor) not in done]


def _below(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    prefix = f"{source}." if source else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _misfit(tensor: Tensor, target: Mapping[str, Tensor], name: str) -> str | None:
    if name not in target:
        return "the graph has no such tensor"
    if tensor.shape != target[name].shape:
        return f"shape {list(tensor.shape)} in the file, {list(target[name].shape)} in the graph"
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
