"""What `build` says about flows that cannot be built, word for word."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.flow import Flow, FlowError


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def contains_itself() -> Flow:
    flow = Flow(linear())
    return flow.through(flow)


def unfinished_loop() -> Flow:
    flow = Flow(linear())
    flow.loop(linear())
    return flow


def unfinished_map() -> Flow:
    flow = Flow(linear())
    flow.map(linear())
    return flow


STATIC: dict[str, tuple[Callable[[], Flow], str]] = {
    "unknown tag": (
        lambda: Flow(linear()).tag("hidden").through(nn.Bilinear(4, 4, 2)).using("hiden"),
        "bilinear_1: unknown tag 'hiden' (did you mean 'hidden'?)",
    ),
    "unknown tag, none near": (
        lambda: Flow(linear()).tag("stem").merge("add").using("zz"),
        "merge_1: unknown tag 'zz' (there are x, stem)",
    ),
    "unknown output": (lambda: Flow(linear()).output("aux"), "the flow: unknown tag 'aux' (there are x)"),
    "dangling split": (
        lambda: Flow().split(linear(), linear(), linear()),
        "split_1: dangling split: 3 streams are still open at the end "
        '(close them with merge("add"), merge("cat") or a function)',
    ),
    "duplicate tag": (
        lambda: Flow(linear()).tag("a").through(linear()).label("b").tag("a"),
        "b: duplicate tag 'a', already given to node 1 (give every point its own name)",
    ),
    "tag named as an input": (
        lambda: Flow(linear()).label("first").tag("x"),
        "first: duplicate tag 'x', already given to an input (give every point its own name)",
    ),
    "duplicate label": (
        lambda: Flow(linear()).label("a").through(linear()).label("a"),
        "a: duplicate label 'a', already taken (give every node its own name)",
    ),
    "tag that is no name": (
        lambda: Flow(linear()).label("first").tag("a.b"),
        "first: tag 'a.b' is not a name (use letters, digits and underscores, beginning with a letter)",
    ),
    "tag that hides a method": (
        lambda: Flow(linear()).label("first").tag("train"),
        "first: tag 'train' is the name of something every graph has (choose another, such as 'train_1')",
    ),
    "cycle of flows": (
        contains_itself,
        "flow_1: a cycle: the flow contains itself (nest another flow, or repeat a module with loop(...))",
    ),
    "cycle of a map": (
        lambda: Flow().map(linear()).over("late").through(linear()).tag("late"),
        "map_1: a cycle: the map runs over tag 'late', which comes after it "
        "(tag an earlier point, or feed the state of the tag with using(...))",
    ),
    "too many inputs": (
        lambda: Flow(linear()).tag("a").through(linear()).using("a"),
        "linear_1: Linear takes 1 input, the flow feeds it 2 (the stream, 'a') (leave some out of using(...))",
    ),
    "too few inputs": (
        lambda: Flow(nn.Bilinear(4, 4, 2)),
        "bilinear_1: Bilinear takes 2 inputs, the flow feeds it 1 (the stream) (feed the rest with using(...))",
    ),
    "merge by a function of other arity": (
        lambda: Flow().split(linear(), linear()).merge(lambda a: a),
        "merge_1: <lambda> takes 1 input, the flow feeds it 2 (2 streams, 0 tags) (give a function of as many inputs)",
    ),
    "merge of one stream": (
        lambda: Flow(linear()).merge("add"),
        "merge_1: a merge needs at least 2 streams, got 1 (split first, or add tags with using(...))",
    ),
    "unknown merge": (
        lambda: Flow().split(linear(), linear()).merge("max"),
        "merge_1: unknown merge 'max' (use one of add, mean, cat, or a function)",
    ),
    "split of one": (
        lambda: Flow().split(linear()),
        "split_1: a split needs at least 2 branches, got 1 (use through() for one module)",
    ),
    "open streams": (
        lambda: Flow().split(linear(), linear()).through(linear()),
        "linear_1: 2 streams are open, through takes one (merge them first)",
    ),
    "tag on open streams": (
        lambda: Flow().split(linear(), linear()).tag("pair").merge("add"),
        "pair: tag 'pair' would name 2 streams (merge them, then tag)",
    ),
    "slices of open streams": (
        lambda: Flow().split(linear(), linear()).map(linear()).slices(2),
        "map_1: 2 streams are open, this map takes one (merge them first)",
    ),
    "unfinished loop": (
        unfinished_loop,
        "loop_1: the loop has no end (follow it with .times(n), .until(...) or .while_(...))",
    ),
    "unfinished map": (
        unfinished_map,
        'map_1: the map has no range (follow it with .each(), .over("tag") or .slices(n))',
    ),
    "loop of no turns": (
        lambda: Flow().loop(linear()).times(0),
        "loop_1: a loop runs at least once, got 0 (give 1 or more)",
    ),
    "no slices": (
        lambda: Flow().map(linear()).slices(0),
        "map_1: a map needs at least 1 slice, got 0 (give 1 or more)",
    ),
    "no experts": (
        lambda: Flow().gate(linear(), []),
        "gate_1: a gate needs experts, got none (give a list of experts)",
    ),
    "no module": (
        lambda: Flow(linear()).through(3),
        "int_1: expected a module, a flow or a function, got 3 (pass an instance of nn.Module)",
    ),
    "a class for a module": (
        lambda: Flow(nn.ReLU),
        "relu_1: expected a module, a flow or a function, got <class 'torch.nn.modules.activation.ReLU'> "
        "(pass an instance of nn.Module)",
    ),
    "unused input": (
        lambda: Flow(linear()).input("mask"),
        "the flow: input 'mask' is never used (feed it to a module with using('mask'))",
    ),
    "unused fork": (
        lambda: Flow(linear()).fork(linear()).label("side").through(linear()),
        "side: the fork is never used (tag it, then name the tag in using(...) or output(...))",
    ),
    "using too early": (
        lambda: Flow().using("a").through(linear()),
        "the flow: using() comes before any module (add a module first)",
    ),
    "label too early": (
        lambda: Flow().label("a").through(linear()),
        "the flow: label 'a' comes before any module (add a module first)",
    ),
}


@pytest.mark.parametrize("case", STATIC)
def test_build_names_the_node_and_the_way_out(case: str) -> None:
    make, expected = STATIC[case]
    with pytest.raises(FlowError) as caught:
        make().build()
    assert str(caught.value).splitlines() == ["flow 'flow' has 1 mistake", f"  {expected}"]


def test_build_reports_all_mistakes_at_once() -> None:
    inner = Flow(linear()).through(linear()).using("nowhere").label("inner")
    flow = Flow(linear()).tag("a").through(linear()).label("b").using("missing").also(inner).split(linear(), linear())
    with pytest.raises(FlowError) as caught:
        flow.input("mask").build(name="net")
    assert [mistake.node for mistake in caught.value.mistakes] == [
        "b", "b", "also_1.body.inner", "also_1.body.inner", "split_1", "",
    ]  # fmt: skip
    assert str(caught.value).startswith("flow 'net' has 6 mistakes\n")


def test_a_flow_error_is_a_config_error_and_travels_between_processes() -> None:
    with pytest.raises(FlowError) as caught:
        Flow().split(linear(), linear()).build()
    error = caught.value
    assert isinstance(error, ConfigError)
    assert str(pickle.loads(pickle.dumps(error))) == str(copy.copy(error)) == str(error)


SHAPES: dict[str, tuple[Callable[[], Flow], str]] = {
    "merge": (
        lambda: Flow().split(linear(4, 2), linear(4, 3)).merge("add"),
        "merge_1: unlike shapes meet: split_1.0 5×2, split_1.1 5×3 (bring the branches to one shape)",
    ),
    "merge that would broadcast": (
        lambda: Flow().split(linear(4, 1), linear(4, 3)).merge("mean"),
        "merge_1: unlike shapes meet: split_1.0 5×1, split_1.1 5×3 (bring the branches to one shape)",
    ),
    "cat": (
        lambda: Flow().split(nn.Unflatten(1, (2, 2)), linear()).merge("cat"),
        "merge_1: unlike shapes meet: split_1.0 5×2×2, split_1.1 5×4 (bring the branches to one shape)",
    ),
    "residual": (
        lambda: Flow().also(linear(4, 3)).label("block"),
        "block: unlike shapes meet: the stream 5×4, the body 5×3 "
        "(give also() a skip that brings the stream to the shape of the body)",
    ),
    "module": (
        lambda: Flow(linear(3, 3)).label("head"),
        "head: Linear fails on 5×4: mat1 and mat2 shapes cannot be multiplied (5x4 and 3x3) "
        "(check the sizes on both sides of this node)",
    ),
    "nested": (
        lambda: Flow(linear()).also(Flow(linear()).also(linear(4, 2)).label("inner")).label("outer"),
        "outer.body.inner: unlike shapes meet: the stream 5×4, the body 5×2 "
        "(give also() a skip that brings the stream to the shape of the body)",
    ),
    "gate": (
        lambda: Flow().gate(linear(4, 3), [linear(), linear()]),
        "gate_1: the router gives 3 scores for 2 experts (let its last dimension be 2)",
    ),
    "switch": (
        lambda: Flow().switch(linear(4, 3), [linear(), linear()]),
        "switch_1: the router gives 3 scores for 2 branches (let its last dimension be 2)",
    ),
    "slices": (
        lambda: Flow().map(linear(1, 1)).slices(3),
        "map_1: dimension 1 has 4 entries, which 3 slices do not divide (choose a number of slices that divides it)",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_are_checked_with_an_example(case: str) -> None:
    make, expected = SHAPES[case]
    with pytest.raises(FlowError) as caught:
        make().build(example=torch.zeros(5, 4))
    assert str(caught.value).splitlines() == ["flow 'flow' has 1 mistake", f"  {expected}"]


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_are_checked_at_the_first_forward(case: str) -> None:
    make, expected = SHAPES[case]
    graph = make().build()
    with pytest.raises(FlowError) as caught:
        graph(torch.zeros(5, 4))
    assert str(caught.value).splitlines()[1:] == [f"  {expected}"]


def test_all_unlike_shapes_are_reported_at_once() -> None:
    flow = Flow().fork(Flow().also(linear(4, 2))).tag("side").also(linear(4, 3)).output("side")
    with pytest.raises(FlowError) as caught:
        flow.build(example=torch.zeros(5, 4))
    assert [mistake.node for mistake in caught.value.mistakes] == ["side.also_1", "also_1"]


def test_a_wrong_number_of_inputs_is_refused() -> None:
    graph = Flow(nn.Bilinear(4, 4, 2)).using("mask").input("mask").build(name="pair")
    with pytest.raises(FlowError) as caught:
        graph(torch.zeros(5, 4))
    assert caught.value.message == (
        "flow 'pair' has 1 mistake\n  the flow: takes 2 inputs (x, mask), got 1 (pass them in this order)"
    )
