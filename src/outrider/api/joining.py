"""Where a session's ranks come from: they are there already, or the script is run again on every device.

Decides whether this process is a rank, becomes the only one, or starts the others and ends with them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.api.options import Order
from outrider.errors import ConfigError
from outrider.machine.devices import DeviceSpec, cuda_devices, resolve_devices
from outrider.runtime.environment import adopted, alone, local_devices, wanted_devices
from outrider.runtime.folder import new_folder
from outrider.runtime.messages import Link, adopted_link
from outrider.runtime.script import cast, run_in_ranks, running_script
from outrider.runtime.session import new_run_dir
from outrider.runtime.world import choose_backend


def find_link(order: Order) -> Link:
    """Who this process is; it ends here where it has only started the ranks."""
    here = cast()
    if here is not None:
        return here.link
    environment = adopted()
    num_threads = order.config.threads_per_rank
    wanted = wanted_devices(order.config.devices)
    if environment is not None:
        specs = local_devices(environment, wanted, cuda_devices=cuda_devices())
        return adopted_link(environment, devices=specs, num_threads=num_threads)
    devices = resolve_devices(wanted, cuda_devices=cuda_devices()).devices
    if len(devices) > 1:
        devices = _start_ranks(order, devices, was_asked=wanted != "auto")
    return adopted_link(alone(), devices=devices, num_threads=num_threads)


def _start_ranks(order: Order, devices: Sequence[DeviceSpec], *, was_asked: bool) -> tuple[DeviceSpec, ...]:
    """Run the script in ranks of its own and end this process with them; a notebook goes on with one device."""
    choose_backend(order.config.backend, devices)
    order.recipe.planner_config(len(devices))
    script = running_script()
    if script is None:
        return _only_one(devices, was_asked=was_asked)
    wish = new_run_dir(order.recipe.policy)
    run_dir = order.config.run_dir or new_folder(wish.parent, wish.name)
    sys.stdout.flush()
    code = run_in_ranks(
        script, devices=devices, run_dir=run_dir, num_threads=order.config.threads_per_rank, port=order.config.port
    )
    raise SystemExit(code)


def _only_one(devices: Sequence[DeviceSpec], *, was_asked: bool) -> tuple[DeviceSpec, ...]:
    names = ",".join(str(spec) for spec in devices)
    way_out = f"save the loop as a script and run `outrider run --devices {names} script.py`, or call outrider.train()"
    if was_asked:
        raise ConfigError(
            f"{len(devices)} devices asked for, but there is no script to run on each: a notebook has one device",
            hint=way_out,
        )
    print(f"outrider: {devices[0]} of {len(devices)} devices is used here; to use all: {way_out}", file=sys.stderr)
    return (devices[0],)
