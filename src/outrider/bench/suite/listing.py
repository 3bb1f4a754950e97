"""Lists the models of the suite and the modes that can run here, as text for 80 columns.

Decides what is shown of models and modes. Starts nothing. Called by `bench list`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from outrider.bench.datasets.source import COLLECTIONS
from outrider.bench.modes import mode_names, obstacle, parse_mode
from outrider.bench.peers.peer_table import PEERS
from outrider.bench.tables import number, text_table
from outrider.bench.zoo import ENTRIES, Entry
from outrider.machine.devices import DeviceSpec, cuda_devices, num_cores
from outrider.policy.policies import POLICY_TABLE

WIDTH = 80
_WHAT = {
    "solo": "one device alone",
    "graph-sync": "a flow in a user's own loop (outrider.setup), policy sync; for models written as a flow",
    **{name: spec.summary.replace("`", "") for name, spec in POLICY_TABLE.items()},
}


def render_list(devices: Sequence[DeviceSpec]) -> str:
    """Models, devices, modes."""
    headers = ("model", "data", "metric", "parameters", "batch", "epochs", "published")
    models = text_table(headers, [_model_row(entry) for entry in ENTRIES.values()], num_names=3)
    here = ", ".join([*cuda_devices(), f"cpu with {num_cores()} cores"])
    names = ",".join(map(str, devices))
    modes = "\n".join(_mode_lines(name, devices) for name in mode_names(len(devices)))
    return f"{models}\n\ndevices here: {here}\n\nmodes on {names}:\n{modes}"


def _model_row(entry: Entry) -> list[str]:
    return [
        entry.name,
        COLLECTIONS[entry.data].real.title,
        entry.metric,
        f"{entry.num_parameters:,}",
        str(entry.batch_size),
        str(entry.epochs),
        number(entry.published, ".4g"),
    ]


def _mode_lines(name: str, devices: Sequence[DeviceSpec]) -> str:
    reason = obstacle(parse_mode(name, num_devices=len(devices)), devices)
    text = _what(name) if reason is None else f"cannot run here: {reason}"
    return textwrap.fill(text, WIDTH, initial_indent=f"  {name:<28}", subsequent_indent=" " * 30)


def _what(name: str) -> str:
    if name in PEERS:
        return PEERS[name].note
    if name in _WHAT:
        return _WHAT[name]
    return _WHAT["solo" if name.startswith("solo-") else name.rpartition("-")[2]]
