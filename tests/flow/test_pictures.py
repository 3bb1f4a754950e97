"""Summaries, pictures and profiles."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outrider.errors import ConfigError
from outrider.flow import Flow, Graph, NodeTime, Profile
from outrider.flow.diagram import Arrow, Box, Diagram, diagram_of
from outrider.flow.diagram_layout import lay_out
from outrider.flow.graph_drawing import to_svg

X = torch.zeros(2, 4)


def network() -> Graph:
    return (
        Flow(nn.Linear(4, 8)).tag("stem")
        .also(Flow(nn.Linear(8, 8)).through(nn.ReLU()), skip=nn.Identity()).label("block")
        .through(nn.GRUCell(8, 8)).using("memory").tag("memory")
        .split(nn.Linear(8, 3), nn.Linear(8, 3)).merge("add")
        .build(name="network")
    )  # fmt: skip


def test_summary_is_a_tree_with_shapes_and_counts() -> None:
    assert network().summary(X).splitlines() == [
        "network",
        "─" * 80,
        "node                         what                 output              parameters",
        "─" * 80,
        "x                            input                2×4",
        "├─ stem                      Linear               2×8                         40",
        "├─ block                     also                 2×8                         72",
        "│  ├─ body                   Flow                 2×8                         72",
        "│  │  ├─ linear_1            Linear               2×8                         72",
        "│  │  └─ relu_1              ReLU                 2×8",
        "│  └─ skip                   Identity             2×8",
        "├─ memory                    GRUCell ← memory be… 2×8                        432",
        "├─ split_1                   split 2 branches     2×3                         54",
        "│  ├─ 0                      Linear               2×3                         27",
        "│  └─ 1                      Linear               2×3                         27",
        "└─ merge_1                   merge add            2×3",
        "─" * 80,
        "598 parameters",
    ]


def test_summary_before_any_shape_is_known_leaves_shapes_out() -> None:
    assert "├─ stem                      Linear                                           40" in network().summary()


def test_summary_says_what_is_frozen() -> None:
    assert network().freeze("stem").summary().endswith("598 parameters, 40 frozen")


def test_summary_goes_as_deep_as_asked() -> None:
    assert len(network().summary(depth=1).splitlines()) == 12


def test_mermaid_text() -> None:
    graph = Flow(torch.add).using("total").tag("total").build()
    assert graph.mermaid().splitlines() == [
        "flowchart TD",
        '    n0(["x"])',
        '    n1["total<br/>add"]',
        '    n2(["output<br/>total"])',
        "    n0 --> n1",
        '    n1 -. "total, before" .-> n1',
        "    n1 --> n2",
    ]


def test_dot_text() -> None:
    graph = Flow().also(nn.ReLU()).label("block").build(name="net")
    assert graph.dot().splitlines() == [
        'digraph "net" {',
        "    rankdir=TB;",
        '    node [shape=box, style=rounded, fontname="sans-serif"];',
        '    n0 [label="x", shape=oval];',
        '    n1 [label="block\\nReLU"];',
        '    n2 [label="add", shape=circle];',
        '    n3 [label="output", shape=oval];',
        "    n0 -> n1;",
        "    n1 -> n2;",
        "    n0 -> n2;",
        "    n2 -> n3;",
        "}",
    ]


@pytest.mark.parametrize("name", ["net.svg", "net.mmd", "net.dot"])
def test_draw_writes_what_the_ending_says(tmp_path: Path, name: str) -> None:
    beginnings = {"net.svg": "<svg ", "net.mmd": "flowchart TD", "net.dot": "digraph "}
    assert network().draw(tmp_path / "new" / name).read_text(encoding="utf-8").startswith(beginnings[name])


def test_draw_refuses_other_endings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        network().draw(tmp_path / "net.png")
    assert str(caught.value) == f"cannot draw a .png: {tmp_path / 'net.png'}\nhint: use one of .svg, .mmd, .dot"


def test_the_picture_is_well_formed_and_names_every_node(tmp_path: Path) -> None:
    root = ElementTree.parse(network().draw(tmp_path / "net.svg", X)).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"network", "stem", "block", "skip", "memory", "split_1.0", "memory, before", "add", "2×8"} <= texts


def test_the_picture_has_a_dark_side(tmp_path: Path) -> None:
    assert "prefers-color-scheme: dark" in network().draw(tmp_path / "net.svg").read_text()


def test_names_are_escaped_in_pictures() -> None:
    box = Box(name="a", kind="through", lines=("a < b & c",))
    assert "a &lt; b &amp; c" in to_svg(Diagram(title="<t>", subtitle="", boxes=(box,), arrows=()))


@st.composite
def diagrams(draw: st.DrawFn) -> Diagram:
    count = draw(st.integers(2, 12))
    names = [f"node{index}" for index in range(count)]
    pairs = draw(st.sets(st.sampled_from(list(combinations(names, 2))), max_size=20))
    boxes = tuple(Box(name=name, kind="through", lines=(name, "x" * draw(st.integers(1, 30)))) for name in names)
    return Diagram(title="t", subtitle="s", boxes=boxes, arrows=tuple(Arrow(a, b) for a, b in sorted(pairs)))


@settings(max_examples=60, deadline=None)
@given(diagram=diagrams())
def test_boxes_never_overlap(diagram: Diagram) -> None:
    places = lay_out(diagram).places
    pairs = combinations([places[box.name] for box in diagram.boxes], 2)
    assert all(
        abs(a.x - b.x) >= (a.width + b.width) / 2 - 1e-6 or abs(a.y - b.y) >= (a.height + b.height) / 2 - 1e-6
        for a, b in pairs
    )


@settings(max_examples=60, deadline=None)
@given(diagram=diagrams())
def test_arrows_point_down_and_everything_is_inside(diagram: Diagram) -> None:
    layout = lay_out(diagram)
    assert all(layout.places[arrow.source].y < layout.places[arrow.target].y for arrow in diagram.arrows)
    assert all(place.x - place.width / 2 >= 0 for place in layout.places.values())
    assert all(place.x + place.width / 2 <= layout.width for place in layout.places.values())
    assert all(place.y + place.height / 2 <= layout.height for place in layout.places.values())


def test_a_chain_is_drawn_straight() -> None:
    graph = Flow(nn.Linear(4, 4)).also(nn.Linear(4, 4)).through(nn.ReLU()).build()
    diagram = diagram_of(graph)
    places = lay_out(diagram).places
    assert len({round(places[box.name].x, 3) for box in diagram.boxes}) == 1


def test_profile_times_every_node() -> None:
    profile = network().profile(X, repeats=2)
    names = ["stem", "block", "memory", "split_1.0", "split_1.1", "merge_1"]
    assert [each.node for each in profile.nodes] == names
    assert all(each.forward_ms > 0 for each in profile.nodes)
    assert sum(profile.share(name) for name in names) == pytest.approx(1)


def test_profile_leaves_the_graph_as_it_was() -> None:
    graph = Flow(nn.BatchNorm1d(4)).label("norm").build()
    graph.profile(X, repeats=2)
    assert graph.get_buffer("norm.num_batches_tracked").item() == 0
    assert graph.get_parameter("norm.weight").grad is None


def test_profile_as_text() -> None:
    profile = Profile(
        nodes=(
            NodeTime(node="stem", forward_ms=1.0, backward_ms=2.0),
            NodeTime(node="head", forward_ms=0.5, backward_ms=0.5),
        ),
        repeats=10,
    )
    assert str(profile).splitlines() == [
        "node                          forward ms  backward ms   share",
        "stem                               1.000        2.000   75.0%",
        "head                               0.500        0.500   25.0%",
        "4.000 ms in all, median of 10 runs after a warm-up",
    ]


def test_profile_needs_a_run() -> None:
    with pytest.raises(ConfigError, match="repeats must be >= 1, got 0"):
        network().profile(X, repeats=0)


def test_heat_in_the_picture_follows_the_time() -> None:
    graph = Flow(nn.Linear(4, 4)).label("cold").through(nn.Linear(4, 4)).label("hot").build()
    profile = Profile(
        nodes=(
            NodeTime(node="cold", forward_ms=1.0, backward_ms=0.0),
            NodeTime(node="hot", forward_ms=3.0, backward_ms=1.0),
        ),
        repeats=1,
    )
    heat = {box.name: box.heat for box in diagram_of(graph, profile).boxes}
    assert (heat["cold"], heat["hot"]) == (0.25, 1.0)
    assert "4.00 ms · 80%" in to_svg(diagram_of(graph, profile))
