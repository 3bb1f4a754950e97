"""A mixture of experts, soft and hard: `gate` weighs all experts, `switch` sends each sample through one.

The task has two regimes, told apart by the sign of the first feature, so one linear expert is not enough.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.flow import Flow, Graph


def soft_mixture() -> Graph:
    """Every expert sees every sample; the router learns the weights."""
    experts = [nn.Linear(4, 1) for _ in range(2)]
    return Flow().gate(nn.Linear(4, 2), experts).tag("mixture").build(name="soft")


def regime(x: Tensor) -> Tensor:
    """The branch of each sample, as an index."""
    return (x[:, 0] > 0).long()


def hard_mixture() -> Graph:
    """Each sample sees one expert; the router is a rule that we know."""
    return Flow().switch(regime, [nn.Linear(4, 1) for _ in range(2)]).tag("experts").build(name="hard")


def two_regimes(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4)
    slopes = torch.where(x[:, :1] > 0, torch.tensor([3.0, -2.0, 0.0, 1.0]), torch.tensor([-1.0, 2.0, 2.0, 0.0]))
    return x, (slopes * x).sum(1, keepdim=True)


def fit(model: nn.Module, x: Tensor, y: Tensor, *, steps: int = 150) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    torch.manual_seed(0)
    x, y = two_regimes(256)
    print(f"one linear layer:  error {fit(nn.Linear(4, 1), x, y):.3f}")
    soft = soft_mixture()
    print(f"soft mixture of 2: error {fit(soft, x, y):.3f}")
    hard = hard_mixture()
    print(f"hard mixture of 2: error {fit(hard, x, y):.3f}")

    hard.zero_grad()
    hard(x[x[:, 0] > 0]).sum().backward()
    touched = [name for name, parameter in hard.named_parameters() if parameter.grad is not None]
    print(f"samples of regime 1 reach only {', '.join(touched)}")


if __name__ == "__main__":
    main()
