"""The session of an `Accelerator`, and the arguments that it refuses.

Decides whether an Accelerator opens a session or uses the open one. Used by `outrider.integrations.accelerate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.api.session import Session, framework_session, open_session
from outrider.errors import ConfigError

DEFAULT_POLICY = "balanced"
"""Scripts of accelerate gather values in their loops; with this policy all ranks take every step."""
_DIVIDES = "it divides the model among processes, and every rank of a session has a whole one; leave it out"
_REFUSED = {
    "deepspeed_plugin": _DIVIDES,
    "deepspeed_plugins": _DIVIDES,
    "fsdp_plugin": _DIVIDES,
    "megatron_lm_plugin": _DIVIDES,
    "torch_tp_plugin": _DIVIDES,
    "parallelism_config": _DIVIDES,
    "split_batches": 'the policy divides batches: pass session_options={"policy": "balanced"}',
}


def join_session(options: Mapping[str, Any]) -> tuple[Session, bool]:
    """The session of this process, and whether it was opened here; ranks are started if there are none yet."""
    session = open_session()
    if session is None:
        return framework_session(options, policy=DEFAULT_POLICY).open(), True
    if options:
        raise ConfigError(
            f"session_options was given ({', '.join(options)}), but a session is open already",
            hint="pass these options to that outrider.Session",
        )
    return session, False


def refuse_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for every argument of an Accelerator that a session cannot honour."""
    if args:
        raise ConfigError("Accelerator() takes its arguments by name", hint="write Accelerator(mixed_precision=...)")
    for name, way_out in _REFUSED.items():
        if kwargs.get(name):
            raise ConfigError(f"Accelerator({name}=...) does not work in an outrider session", hint=way_out)
    if not kwargs.get("step_scheduler_with_optimizer", True):
        raise ConfigError(
            "Accelerator(step_scheduler_with_optimizer=False): ranks that take different numbers of batches would "
            "count different steps",
            hint="leave it out; a schedule that is stepped outside of the loop steps once per call",
        )
    config = kwargs.get("dataloader_config")
    for name in ("split_batches", "dispatch_batches", "use_stateful_dataloader"):
        if config is not None and getattr(config, name):
            raise ConfigError(f"DataLoaderConfiguration({name}=...): the session reads the data", hint="leave it out")
