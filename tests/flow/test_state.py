"""Recurrent state: a tag that is used before it comes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.flow import Flow, FlowError, Graph
from outrider.flow.emit import state_of

ONES = torch.ones(2, 3)


def summing() -> Graph:
    """Adds up everything it was ever given."""
    return Flow(torch.add).using("total").tag("total").build(name="summing")


def recurrent(hidden: int = 5) -> Graph:
    return Flow(nn.GRUCell(3, hidden)).using("memory").tag("memory").build()


def test_state_begins_at_zeros_and_is_what_the_tag_was_before() -> None:
    graph = summing()
    assert torch.equal(graph(ONES), ONES)
    assert torch.equal(graph(ONES), 2 * ONES)


def test_a_flow_with_state_equals_the_loop_by_hand() -> None:
    cell, xs = nn.GRUCell(3, 5), torch.randn(4, 2, 3)
    graph = Flow(cell).using("memory").tag("memory").build()
    by_hand = torch.zeros(2, 5)
    for x in xs:
        by_hand = cell(x, by_hand)
        given = graph(x)
    torch.testing.assert_close(given, by_hand)


def test_reset_begins_again_at_zeros() -> None:
    graph = summing()
    graph(ONES)
    graph.reset_state()
    assert torch.equal(graph(ONES), ONES)


def test_gradients_flow_through_time() -> None:
    graph, first = summing(), ONES.clone().requires_grad_()
    graph(first)
    graph(ONES).sum().backward()
    assert first.grad is not None


def test_detach_cuts_time_but_keeps_the_value() -> None:
    graph, first = summing(), ONES.clone().requires_grad_()
    graph(first)
    graph.detach_state()
    assert torch.equal(graph(ONES), 2 * ONES)
    assert not graph(ONES).requires_grad


def test_another_batch_size_begins_again_at_zeros() -> None:
    graph = summing()
    graph(ONES)
    assert torch.equal(graph(ONES[:1]), ONES[:1])


def test_state_is_not_saved_averaged_or_broadcast_with_the_model() -> None:
    graph = recurrent()
    graph(ONES)
    assert not any("state" in name for name in graph.state_dict())
    assert not list(graph.buffers())


def test_state_of_another_size_than_the_stream_is_found() -> None:
    graph = recurrent(hidden=7)
    graph(ONES)
    assert state_of(graph, "memory").size == (7,)


def test_a_state_of_two_tensors() -> None:
    def first(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]

    cell = nn.LSTMCell(3, 5)
    graph = Flow(cell).using("memory").tag("memory").through(first).build()
    graph(ONES)
    torch.testing.assert_close(graph(ONES), cell(ONES, cell(ONES))[0])


def test_two_states_in_one_flow() -> None:
    graph = (
        Flow(nn.GRUCell(3, 5)).using("memory").tag("memory").merge("add").using("slow").through(nn.Linear(5, 5))
    ).tag("slow").build(example=ONES)  # fmt: skip
    graph(ONES)
    assert state_of(graph, "memory").size == state_of(graph, "slow").size == (5,)


def test_integer_inputs_have_float_states() -> None:
    graph = (
        Flow(nn.Embedding(9, 3)).through(nn.GRUCell(3, 3)).using("memory").tag("memory").build()
    )  # fmt: skip
    assert graph(torch.tensor([1, 2])).shape == (2, 3)


def test_a_state_whose_size_cannot_be_found_is_a_mistake_with_a_way_out() -> None:
    def narrowed(x: Tensor, state: Tensor) -> Tensor:
        return torch.cat([x, state], 1) @ torch.ones(8, 5)

    with pytest.raises(FlowError) as caught:
        Flow(narrowed).using("memory").tag("memory").build(example=ONES)
    assert [str(mistake) for mistake in caught.value.mistakes] == [
        "memory: the size of this state cannot be found (give it with .tag('memory', size=(...)))"
    ]


def test_a_size_may_be_given() -> None:
    def narrowed(x: Tensor, state: Tensor) -> Tensor:
        return torch.cat([x, state], 1) @ torch.ones(8, 5)

    graph = Flow(narrowed).using("memory").tag("memory", size=(5,)).build(example=ONES)
    assert graph(ONES).shape == (2, 5)


def test_states_of_nested_flows_are_reset_and_detached_too() -> None:
    outer = Flow(nn.Sequential(summing(), nn.Identity())).build()
    outer(ONES)
    outer.detach_state()
    outer.reset_state()
    assert torch.equal(outer(ONES), ONES)


def test_checking_shapes_leaves_states_as_they_are() -> None:
    inner = summing()
    inner(ONES)
    Flow(nn.Sequential(inner, nn.Identity())).build(example=ONES)
    assert torch.equal(inner(ONES), 2 * ONES)


def test_a_copy_takes_the_state_along_and_goes_its_own_way() -> None:
    graph = recurrent()
    graph(ONES)
    twin = copy.deepcopy(graph)
    expected = graph(ONES)
    torch.testing.assert_close(twin(ONES), expected)
    twin.reset_state()
    assert state_of(graph, "memory").value is not None


def test_state_follows_the_model_to_another_type() -> None:
    graph = recurrent()
    graph(ONES)
    assert graph.double()(ONES.double()).dtype == torch.float64


def test_an_unknown_size_is_said_where_nothing_can_be_searched() -> None:
    graph = recurrent()
    with pytest.raises(ConfigError) as caught:
        graph.forward(ONES)
    assert caught.value.message == "the size of state 'memory' is not known"
