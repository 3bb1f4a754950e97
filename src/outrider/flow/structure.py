"""The structure of a graph as lines of text: what two files must share to be the same network.

Counts wiring, layer types, and names and shapes of tensors; not their numbers, nor settings such as dropout or stride.
Called by `files` and by `Graph.structure_hash`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence

from torch import nn

from outrider.flow.plan import Node
from outrider.flow.wired import Wired


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
