"""Which parameters train: freezing and thawing by path.

Decides what a path means; BatchNorm statistics and dropout follow train() and eval() as usual. Called by `Graph`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from outrider.errors import ConfigError, did_you_mean


def freeze(module: nn.Module, paths: Sequence[str]) -> None:
    """Stop training the parameters under the paths."""
    for parameter in _under(module, paths):
        parameter.requires_grad_(False)


def thaw(module: nn.Module, paths: Sequence[str]) -> None:
    """Train the parameters under the paths."""
    for parameter in _under(module, paths):
        parameter.requires_grad_(True)


def _under(module: nn.Module, paths: Sequence[str]) -> Iterator[nn.Parameter]:
    """All paths are looked up before the first parameter changes."""
    found = [parameter for path in paths or ("",) for parameter in parameters_at(module, path)]
    yield from found


def parameters_at(module: nn.Module, path: str) -> list[nn.Parameter]:
    """The parameter at a path, or all of the module there."""
    parameters = dict(module.named_parameters())
    if path in parameters:
        return [parameters[path]]
    return list(module_at(module, path).parameters())


def module_at(module: nn.Module, path: str) -> nn.Module:
    """The module at a path, the whole one for an empty path."""
    modules: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if path not in modules:
        known = [*modules, *dict(module.named_parameters())]
        top = ", ".join(name for name, _ in module.named_children())
        raise ConfigError(f"nothing is at path {path!r}", hint=did_you_mean(path, known, otherwise=f"the top is {top}"))
    return modules[path]
