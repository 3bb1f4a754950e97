"""A recurrent flow: a node uses a tag that comes later, which is what the tag was in the forward before.

Learns to say what it saw two steps ago, by truncated backpropagation through time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.flow import Flow, Graph

SYMBOLS, DELAY = 4, 2


def delayed_copy() -> Graph:
    return (
        Flow(nn.Embedding(SYMBOLS, 16)).label("embedding")
        .through(nn.GRUCell(16, 32)).using("memory").tag("memory")
        .through(nn.Linear(32, SYMBOLS)).label("head")
        .build(name="delayed copy", example=torch.zeros(8, dtype=torch.long))
    )  # fmt: skip


def train_on(model: Graph, sequence: Tensor, optimizer: torch.optim.Optimizer, *, window: int = 8) -> float:
    """One pass over a sequence (time first); gradients flow through `window` steps, the state through all."""
    model.reset_state()
    losses: list[Tensor] = []
    for time in range(len(sequence)):
        logits = model(sequence[time])
        if time >= DELAY:
            losses.append(F.cross_entropy(logits, sequence[time - DELAY]))
        if (time + 1) % window == 0:
            loss = torch.stack(losses[-window:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.detach_state()
            losses = [each.detach() for each in losses]
    return float(torch.stack(losses).mean())


def accuracy(model: Graph, sequence: Tensor) -> float:
    model.reset_state()
    with torch.no_grad():
        answers = torch.stack([model(symbols).argmax(1) for symbols in sequence])
    return float((answers[DELAY:] == sequence[:-DELAY]).float().mean())


def main() -> None:
    torch.manual_seed(0)
    model = delayed_copy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    test = torch.randint(SYMBOLS, (40, 64))
    print(f"accuracy before: {accuracy(model, test):.0%} (chance is {1 / SYMBOLS:.0%})")
    for round_number in range(1, 16):
        loss = train_on(model, torch.randint(SYMBOLS, (32, 32)), optimizer)
        if round_number % 5 == 0:
            print(f"round {round_number}: loss {loss:.3f}")
    print(f"accuracy after:  {accuracy(model, test):.0%}")
    print(f"saved with the model: {', '.join(model.state_dict())}")


if __name__ == "__main__":
    main()
