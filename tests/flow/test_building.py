"""What each method of the builder makes, against the same thing written with tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.flow import Flow, Graph


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


X = torch.arange(12.0).reshape(3, 4) / 10


def test_through_runs_modules_in_order() -> None:
    first, second = linear(), linear(4, 2)
    assert torch.equal(Flow(first).through(second).build()(X), second(first(X)))


def test_also_adds_the_stream() -> None:
    body = linear()
    assert torch.equal(Flow().also(body).build()(X), X + body(X))


def test_also_with_skip_adds_the_skip() -> None:
    body, skip = linear(4, 2), linear(4, 2)
    assert torch.equal(Flow().also(body, skip=skip).build()(X), skip(X) + body(X))


def test_fork_leaves_the_stream_unchanged() -> None:
    side, main = linear(), linear()
    graph = Flow().fork(side).tag("side").through(main).merge("add").using("side").build()
    assert torch.equal(graph(X), main(X) + side(X))


def test_split_and_merge_add() -> None:
    a, b, c = linear(), linear(), linear()
    assert torch.equal(Flow().split(a, b, c).merge("add").build()(X), a(X) + b(X) + c(X))


def test_split_and_merge_mean() -> None:
    a, b = linear(), linear()
    assert torch.equal(Flow().split(a, b).merge("mean").build()(X), (a(X) + b(X)) / 2)


def test_split_and_merge_cat_along_features() -> None:
    a, b = linear(4, 2), linear(4, 3)
    assert torch.equal(Flow().split(a, b).merge("cat").build()(X), torch.cat([a(X), b(X)], 1))


def test_merge_cat_along_another_dimension() -> None:
    a, b = linear(), linear()
    assert torch.equal(Flow().split(a, b).merge("cat", dim=0).build()(X), torch.cat([a(X), b(X)], 0))


def test_merge_with_a_function() -> None:
    a, b = linear(), linear()
    assert torch.equal(Flow().split(a, b).merge(torch.mul).build()(X), a(X) * b(X))


def test_merge_brings_a_tag_into_the_stream() -> None:
    a, b = linear(), linear()
    graph = Flow(a).tag("early").through(b).merge("cat").using("early").build()
    assert torch.equal(graph(X), torch.cat([b(a(X)), a(X)], 1))


def test_using_feeds_a_tag_as_further_input() -> None:
    a, bilinear = linear(), nn.Bilinear(4, 4, 2)
    graph = Flow(a).tag("early").through(torch.tanh).through(bilinear).using("early").build()
    assert torch.equal(graph(X), bilinear(torch.tanh(a(X)), a(X)))


def test_a_tag_before_any_module_names_the_input() -> None:
    a = linear()
    assert torch.equal(Flow().tag("raw").through(a).merge("add").using("raw").build()(X), a(X) + X)


def test_further_inputs_come_after_the_first() -> None:
    bilinear = nn.Bilinear(4, 4, 2)
    graph = Flow(bilinear, input="left").using("right").input("right").build()
    assert torch.equal(graph(left=X, right=X + 1), bilinear(X, X + 1))


def test_output_lets_a_tag_out_beside_the_stream() -> None:
    side, main = linear(), linear()
    stream, tagged = Flow().fork(side).tag("side").through(main).output("side").build()(X)
    assert torch.equal(stream, main(X))
    assert torch.equal(tagged, side(X))


def test_parameter_names_follow_tags_and_labels() -> None:
    graph = Flow(linear()).tag("stem").also(linear(), skip=linear()).label("block").through(linear()).build()
    names = ["stem", "block.body", "block.skip", "linear_1"]
    assert list(graph.state_dict()) == [f"{name}.{tensor}" for name in names for tensor in ("weight", "bias")]


def test_a_label_wins_over_a_tag() -> None:
    graph = Flow(linear()).tag("point").label("layer").through(linear()).using().build()
    assert next(iter(graph.state_dict())) == "layer.weight"


def test_names_of_routed_parts_are_numbered() -> None:
    graph = Flow().gate(linear(4, 2), [linear(), linear()]).label("mixture").build()
    assert list(graph.state_dict())[::2] == [
        "mixture.router.weight",
        "mixture.experts.0.weight",
        "mixture.experts.1.weight",
    ]


def test_flows_nest_in_flows() -> None:
    a, b = linear(), linear()
    inner = Flow(a).through(b)
    graph = Flow().also(inner).label("block").build()
    assert torch.equal(graph(X), X + b(a(X)))
    assert "block.body.linear_1.weight" in graph.state_dict()


def test_a_flow_used_twice_shares_its_parameters() -> None:
    inner = Flow(linear())
    graph = Flow(inner).through(inner).build()
    assert len(list(graph.parameters())) == 2


def test_graphs_nest_in_sequential() -> None:
    a, b = linear(), linear()
    model = nn.Sequential(Flow(a).build(), b)
    assert torch.equal(model(X), b(a(X)))
    assert next(iter(model.state_dict())) == "0.linear_1.weight"


def test_a_graph_is_a_module_with_its_own_code() -> None:
    graph = Flow(linear()).tag("stem").through(torch.relu).build()
    assert isinstance(graph, Graph)
    assert isinstance(graph, nn.Module)
    assert "stem = self.stem(x)" in graph.code


def test_functions_of_torch_are_called_without_a_module() -> None:
    graph = Flow(torch.relu).fork(torch.tanh).tag("side").merge(torch.mul).using("side").build()
    assert "torch.relu(x)" in graph.code
    assert not list(graph.children())
    assert torch.equal(graph(X), torch.relu(X) * torch.tanh(torch.relu(X)))


def test_gradients_reach_every_parameter() -> None:
    graph = Flow(linear()).also(linear()).split(linear(), linear()).merge("mean").build()
    graph(X).sum().backward()
    assert all(parameter.grad is not None for parameter in graph.parameters())


def test_modules_may_return_tuples() -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :2], x[:, 2:]

    def first(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]

    assert torch.equal(Flow(halves).through(first).build()(X), X[:, :2])
