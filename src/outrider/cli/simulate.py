"""`outrider simulate`: what training on given devices would gain under each policy, without any of them.

Parses, calls, prints; the simulator is in outrider.virtual. Needs no torch.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

EPILOG = "Example: outrider simulate --devices 1,0.4,0.4 --model-mb 500 --link 1gbit"


def simulate(
    devices: Annotated[
        str, typer.Option("--devices", metavar="LIST", help="Speeds 1,0.4x2, or specs cuda:0,cpu@0.4.")
    ] = "1,0.4",
    policy: Annotated[str, typer.Option("--policy", help="One policy, or all.")] = "all",
    step_ms: Annotated[float, typer.Option("--step-ms", help="Time of a batch at speed 1.")] = 100.0,
    fixed_part: Annotated[float, typer.Option("--fixed-part", help="Part of it that any batch takes, below 1.")] = 0.0,
    jitter: Annotated[float, typer.Option("--jitter", help="Spread of step times; 0.1 is about 10 %.")] = 0.0,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples of a batch, per device.")] = 32,
    batches: Annotated[int, typer.Option("--batches", help="Batches of a device, on average.")] = 400,
    model_mb: Annotated[float, typer.Option("--model-mb", help="Size of what is averaged, in MB.")] = 100.0,
    link: Annotated[str, typer.Option("--link", help="Slowest link: 1gbit, 100mbit, 12GB/s.")] = "10gbit",
    latency_ms: Annotated[float, typer.Option("--latency-ms", help="Latency of that link.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the jitter.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Simulate an epoch on devices of given speeds, policy by policy.

    Runs the policies that train, on clocks alone: thousands of devices take seconds.
    """
    from outrider.policy.policies import POLICIES
    from outrider.virtual.simulator import Network, Scenario
    from outrider.virtual.simulator import simulate as simulate_policy
    from outrider.virtual.what_if import as_document, as_table, megabytes, parse_link, parse_speeds

    scenario = Scenario.from_speeds(
        parse_speeds(devices),
        step_ms=step_ms,
        fixed_part=fixed_part,
        jitter=jitter,
        batch_size=batch_size,
        batches=batches,
        model_bytes=megabytes(model_mb),
        network=Network(latency_ms=latency_ms, bandwidth_bytes_per_s=parse_link(link)),
        seed=seed,
    )
    names = POLICIES if policy == "all" else (policy,)
    outcomes = [simulate_policy(name, scenario) for name in names]
    typer.echo(json.dumps(as_document(scenario, outcomes), indent=1) if as_json else as_table(scenario, outcomes))
