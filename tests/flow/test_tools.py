"""Graphs under the tools of PyTorch: compile, export, fx, copies, pickles."""

from __future__ import annotations

import copy
import pickle
import shutil
import traceback
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from outrider.flow import Flow, Graph

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Opaque(nn.Module):
    """A layer of which nobody knows whether it mixes samples."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def layer(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


GRAPHS: dict[str, Callable[[], Flow]] = {
    "also": lambda: Flow(layer()).also(layer()).also(layer(), skip=layer()),
    "split": lambda: Flow(layer()).split(layer(), nn.ReLU(), torch.tanh).map(layer(4, 3)).each().merge("mean"),
    "cat": lambda: Flow(layer()).tag("early").split(layer(4, 2), layer(4, 3)).merge("cat").using("early"),
    "fork": lambda: Flow(layer()).fork(layer()).tag("side").through(layer()).merge(torch.mul).using("side"),
    "loop": lambda: Flow(layer()).loop(layer()).times(3),
    "gate": lambda: Flow().gate(layer(4, 2), [layer(4, 3), layer(4, 3)]),
    "switch": lambda: Flow().switch(layer(4, 2), [layer(4, 3), layer(4, 3)]),
    "map each": lambda: Flow(nn.Unflatten(1, (2, 2))).map(layer(2, 3)).each(),
    "map in turn": lambda: Flow(nn.Unflatten(1, (2, 2))).map(Opaque(2, 3)).each(),
    "map slices": lambda: Flow().map(layer(2, 3)).slices(2),
    "nested": lambda: Flow(Flow(layer()).also(Flow(layer()).through(nn.ReLU()))).through(layer()),
}


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> Graph:
    return GRAPHS[request.param]().build()


def test_dynamo_takes_the_whole_graph(graph: Graph) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(graph, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), graph(X))


def test_symbolic_trace_gives_the_same_numbers(graph: Graph) -> None:
    torch.testing.assert_close(torch.fx.symbolic_trace(graph)(X), graph(X))


def test_to_fx_gives_the_same_numbers(graph: Graph) -> None:
    torch.testing.assert_close(graph.to_fx()(X), graph(X))


def test_export_gives_the_same_numbers(graph: Graph) -> None:
    torch.testing.assert_close(torch.export.export(graph, (X,)).module()(X), graph(X))


def test_a_deep_copy_is_equal_and_independent(graph: Graph) -> None:
    twin = copy.deepcopy(graph)
    torch.testing.assert_close(twin(X), graph(X))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in graph.parameters()}


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_a_pickle_is_equal(graph: Graph, pickler: object) -> None:
    twin = pickle.loads(pickler.dumps(graph))  # type: ignore[attr-defined]
    torch.testing.assert_close(twin(X), graph(X))


def test_a_copy_that_has_run_is_as_good_as_one_that_has_not(graph: Graph) -> None:
    graph(X)
    torch.testing.assert_close(copy.deepcopy(graph)(X), graph(X))


def test_state_dict_loads_into_a_second_build(graph: Graph, request: pytest.FixtureRequest) -> None:
    second = GRAPHS[request.node.callspec.params["graph"]]().build()
    second.load_state_dict(graph.state_dict())
    torch.testing.assert_close(second(X), graph(X))


def test_cloudpickle_takes_functions_along() -> None:
    graph = Flow(layer()).through(lambda x: x * 2).build()
    torch.testing.assert_close(pickle.loads(cloudpickle.dumps(graph))(X), graph(X))


def test_a_recurrent_graph_compiles_whole() -> None:
    torch._dynamo.reset()
    graph = Flow(nn.GRUCell(4, 4)).using("memory").tag("memory").build(example=X)
    compiled = torch.compile(graph, fullgraph=True, backend="eager")
    given = [compiled(X) for _ in range(3)]
    graph.reset_state()
    torch.testing.assert_close(given, [graph(X) for _ in range(3)])


def test_an_exported_recurrent_graph_begins_at_zeros_every_time() -> None:
    graph = Flow(nn.GRUCell(4, 4)).using("memory").tag("memory").build(example=X)
    exported = torch.export.export(graph, (X,)).module()
    torch.testing.assert_close([exported(X), exported(X)], [graph(X)] * 2)


def test_a_data_dependent_loop_is_one_call_for_fx() -> None:
    graph = Flow(layer()).loop(torch.tanh).until(lambda x: x.norm() < 0.5, at_most=9).build()
    traced = torch.fx.symbolic_trace(graph)
    torch.testing.assert_close(traced(X), graph(X))
    torch.testing.assert_close(traced(X / 100), graph(X / 100))


def test_compiled_and_routed_switches_have_equal_gradients() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)  # a router that sends samples to both branches
    branches = [layer(4, 3), layer(4, 3)]
    graph = Flow().switch(layer(4, 2), branches).build()
    weights = [branch.weight for branch in branches]
    routed = torch.autograd.grad(graph(X).square().sum(), weights)
    compiled = torch.compile(graph, fullgraph=True, backend="eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(X).square().sum(), weights), routed)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_compiles_a_graph_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor sets this variable when it loads what it compiled, and keeps its pool of threads: both are left out.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    torch._dynamo.reset()
    graph = Flow(layer()).tag("stem").also(layer()).merge("cat").using("stem").build()
    expected = torch.autograd.grad(graph(X).sum(), list(graph.parameters()))
    compiled = torch.compile(graph, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(X).sum(), list(graph.parameters())), expected)


def test_tracebacks_show_the_emitted_line() -> None:
    graph = Flow(layer()).label("stem").build()
    graph(X)
    with pytest.raises(RuntimeError) as caught:
        graph(torch.zeros(2, 5))
    assert "stem = self.stem(x)" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_the_shape_check_leaves_random_numbers_and_statistics_alone() -> None:
    graph = Flow(nn.BatchNorm1d(4)).label("norm").through(nn.Dropout(0.5)).build()
    torch.manual_seed(1)
    first = graph(X)
    torch.manual_seed(1)
    assert torch.equal(graph(X), first)
    assert graph.get_buffer("norm.num_batches_tracked").item() == 2
