"""Loops, mixtures, routing and maps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.flow import Flow
from outrider.flow.blocks import MapElements, MapSlices

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def plus_one(x: Tensor) -> Tensor:
    return x + 1


class Opaque(nn.Module):
    """A layer of which nobody knows whether it mixes samples."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def test_loop_runs_a_fixed_number_of_times() -> None:
    assert torch.equal(Flow().loop(plus_one).times(3).build()(X), X + 1 + 1 + 1)


def test_loop_feeds_its_module_what_is_used() -> None:
    graph = Flow().tag("start").loop(torch.add).times(2).using("start").build()
    assert torch.equal(graph(X), X + X + X)


def test_until_stops_when_the_batch_is_done() -> None:
    graph = Flow().loop(plus_one).until(lambda x: x.min() > 10, at_most=50).build()
    assert graph(torch.zeros(2, 1)).tolist() == [[11.0], [11.0]]


def test_until_runs_at_least_once() -> None:
    graph = Flow().loop(plus_one).until(lambda x: True, at_most=5).build()
    assert graph(torch.zeros(1, 1)).item() == 1.0


def test_until_gives_up_at_most() -> None:
    graph = Flow().loop(plus_one).until(lambda x: False, at_most=5).build()
    assert graph(torch.zeros(1, 1)).item() == 5.0


def test_until_stops_each_sample_by_itself() -> None:
    graph = Flow().loop(plus_one).until(lambda x: x[:, 0] >= 3, at_most=10).build()
    assert graph(torch.tensor([[0.0], [2.5], [7.0]])).tolist() == [[3.0], [3.5], [8.0]]


def test_while_asks_first() -> None:
    graph = Flow().loop(plus_one).while_(lambda x: x[:, 0] < 3, at_most=10).build()
    assert graph(torch.tensor([[0.0], [2.5], [7.0]])).tolist() == [[3.0], [3.5], [7.0]]


def test_a_learned_condition_is_part_of_the_model() -> None:
    class Halt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.score(x)
            return scores[:, 0] > 0

    graph = Flow().loop(nn.Linear(4, 4)).until(Halt(), at_most=3).label("think").build()
    assert "think.condition.score.weight" in graph.state_dict()


def test_gate_weighs_experts_by_softmax() -> None:
    router, a, b = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 3)
    weights = router(X).softmax(1)
    expected = weights[:, :1] * a(X) + weights[:, 1:] * b(X)
    torch.testing.assert_close(Flow().gate(router, [a, b]).build()(X), expected)


def test_gate_trains_the_router() -> None:
    router = nn.Linear(4, 2)
    graph = Flow().gate(router, [nn.Linear(4, 3), nn.Linear(4, 3)]).build()
    graph(X).sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() > 0


def test_gate_weighs_every_token_of_a_sequence() -> None:
    router, a, b = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 3)
    tokens = X.reshape(2, 3, 4)
    weights = router(tokens).softmax(-1)
    expected = weights[..., :1] * a(tokens) + weights[..., 1:] * b(tokens)
    torch.testing.assert_close(Flow().gate(router, [a, b]).build()(tokens), expected)


@settings(max_examples=25, deadline=None)
@given(choice=st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_switch_sends_every_sample_through_its_own_branch(choice: list[int]) -> None:
    branches = [nn.Linear(4, 2) for _ in range(3)]
    x = torch.randn(len(choice), 4)
    graph = Flow().switch(lambda x: torch.tensor(choice), branches).build()
    expected = torch.stack([branches[index](row) for index, row in zip(choice, x, strict=True)])
    torch.testing.assert_close(graph(x), expected)


def test_switch_takes_the_highest_score() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    graph = Flow().switch(lambda x: scores, [torch.neg, plus_one]).build()
    assert graph(torch.tensor([[1.0], [1.0]])).tolist() == [[-1.0], [2.0]]


def test_switch_trains_only_the_chosen_branch() -> None:
    branches = [nn.Linear(4, 2), nn.Linear(4, 2)]
    Flow().switch(lambda x: torch.ones(6, dtype=torch.long), branches).build()(X).sum().backward()
    assert branches[0].weight.grad is None
    assert branches[1].weight.grad is not None


def test_switch_shows_batch_norm_only_its_own_samples() -> None:
    norm = nn.BatchNorm1d(4, momentum=1.0)
    choice = torch.tensor([0, 0, 0, 1, 1, 1])
    Flow().switch(lambda x: choice, [norm, nn.Identity()]).build()(X)
    torch.testing.assert_close(norm.running_mean, X[:3].mean(0))


def test_switch_refuses_an_index_without_a_branch() -> None:
    graph = Flow().switch(lambda x: x[:, 0].long(), [torch.neg, torch.abs]).build()
    graph(torch.zeros(2, 1))
    with pytest.raises(ConfigError) as caught:
        graph(torch.tensor([[0.0], [5.0]]))
    assert caught.value.message == "the router chose branches 0 to 5, there are 2"


def test_map_each_over_elements_is_one_batched_call_where_it_can_be() -> None:
    body, tokens = nn.Linear(4, 2), X.reshape(2, 3, 4)
    graph = Flow().map(body).each().label("words").build()
    torch.testing.assert_close(graph(tokens), body(tokens))
    assert isinstance(graph.words, MapElements)
    assert graph.words.is_batched


def test_map_each_goes_in_turn_where_samples_could_mix() -> None:
    norm, tokens = nn.BatchNorm1d(4), X.reshape(2, 3, 4)
    graph = Flow().map(norm).each().label("words").build()
    expected = torch.stack([norm(tokens[:, index]) for index in range(3)], 1)
    norm.reset_running_stats()
    torch.testing.assert_close(graph(tokens), expected)


def test_map_over_a_module_of_unknown_kind_gives_the_same() -> None:
    body, tokens = Opaque(4, 2), X.reshape(2, 3, 4)
    graph = Flow().map(body).each().label("words").build()
    assert isinstance(graph.words, MapElements)
    assert not graph.words.is_batched
    torch.testing.assert_close(graph(tokens), body(tokens))


def test_a_module_may_say_that_it_treats_samples_alone() -> None:
    body = Opaque(4, 2)
    body.treats_samples_alone = True  # type: ignore[assignment]
    assert MapElements(body).is_batched


def test_map_each_after_a_split_shares_one_module() -> None:
    a, b, shared = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)
    graph = Flow().split(a, b).map(shared).each().merge("add").build()
    torch.testing.assert_close(graph(X), shared(a(X)) + shared(b(X)))
    assert len(list(graph.parameters())) == 6


def test_map_over_a_tag_makes_its_result_the_stream() -> None:
    body, tokens = nn.Linear(4, 2), X.reshape(2, 3, 4)
    graph = Flow().tag("tokens").through(nn.Flatten()).map(body).over("tokens").build()
    torch.testing.assert_close(graph(tokens), body(tokens))


@pytest.mark.parametrize("body", [nn.Bilinear(4, 4, 2), lambda a, b: a * b], ids=["batched", "in turn"])
def test_map_feeds_every_element_what_is_used(body: nn.Module) -> None:
    tokens, query = X.reshape(2, 3, 4), X[:2]
    graph = Flow().map(body).each().using("query").input("query").build()
    expected = torch.stack([body(tokens[:, index], query) for index in range(3)], 1)
    torch.testing.assert_close(graph(tokens, query), expected)


@pytest.mark.parametrize("body", [nn.Linear(2, 3), Opaque(2, 3)], ids=["batched", "in turn"])
def test_map_slices_cuts_and_joins(body: nn.Module) -> None:
    graph = Flow().map(body).slices(2).build()
    torch.testing.assert_close(graph(X), torch.cat([body(X[:, :2]), body(X[:, 2:])], 1))


@pytest.mark.parametrize("body", [nn.Bilinear(2, 4, 3), lambda a, b: a * b[:, :2]], ids=["batched", "in turn"])
def test_map_slices_feeds_every_slice_what_is_used(body: nn.Module) -> None:
    graph = Flow().tag("all").map(body).slices(2).using("all").build()
    torch.testing.assert_close(graph(X), torch.cat([body(X[:, :2], X), body(X[:, 2:], X)], 1))


def test_slices_of_images_are_groups_of_channels() -> None:
    graph = Flow().map(nn.Conv2d(2, 3, 1)).slices(4).label("groups").build()
    assert graph(torch.zeros(1, 8, 5, 5)).shape == (1, 12, 5, 5)
    assert isinstance(graph.groups, MapSlices)


def test_softmax_over_the_batch_is_not_batched() -> None:
    assert not MapElements(nn.Softmax(dim=0)).is_batched
    assert MapElements(nn.Softmax(dim=1)).is_batched
