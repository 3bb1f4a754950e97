"""Saving, loading, refusing, loading in part; freezing by path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from outrider.errors import ConfigError, DataError
from outrider.flow import Flow, Graph

X = torch.ones(2, 4)


def network(width: int = 8, *, head: int = 3) -> Graph:
    encoder = Flow(nn.Linear(4, width)).label("inner").through(nn.BatchNorm1d(width)).label("norm")
    return Flow(encoder).tag("encoder").through(nn.Linear(width, head)).tag("head").build(name="network")


def test_a_saved_graph_loads_with_equal_outputs(tmp_path: Path) -> None:
    saved = network().eval()
    saved.save(tmp_path / "deep" / "net.safetensors")
    assert torch.equal(network().eval().load(tmp_path / "deep" / "net.safetensors")(X), saved(X))


def test_the_file_carries_the_structure_hash(tmp_path: Path) -> None:
    graph = network()
    with safe_open(str(graph.save(tmp_path / "net.safetensors")), framework="pt") as file:
        assert file.metadata()["structure_hash"] == graph.structure_hash


def test_the_structure_hash_ignores_numbers_and_dropout() -> None:
    one, other = (Flow(nn.Linear(4, 4)).through(nn.Dropout(p)).build() for p in (0.1, 0.2))
    assert one.structure_hash == other.structure_hash


def test_the_structure_hash_sees_wiring() -> None:
    one = Flow(nn.Linear(4, 4)).tag("a").also(nn.Linear(4, 4)).label("b").build()
    other = Flow(nn.Linear(4, 4)).tag("a").through(nn.Linear(4, 4)).label("b").build()
    assert one.structure_hash != other.structure_hash


def test_a_wrong_file_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = network(head=3).save(tmp_path / "net.safetensors")
    with pytest.raises(DataError) as caught:
        network(head=5).load(path)
    assert str(caught.value).splitlines() == [
        f"{path} is of another network than 'network'; - is the file, + is the graph:",
        "  - head.weight 3×8",
        "  - head.bias 3",
        "  + head.weight 5×8",
        "  + head.bias 5",
        "hint: build the graph that was saved, or read what fits with load_part()",
    ]


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    path = network().save(tmp_path / "net.safetensors")
    flow = Flow(nn.Linear(4, 4))
    for _ in range(20):
        flow.through(nn.Linear(4, 4))
    with pytest.raises(DataError, match="… and 85 more lines"):
        flow.build().load(path)


def test_a_file_of_nobody_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError) as caught:
        network().load(tmp_path / "other.safetensors")
    assert caught.value.message == f"{tmp_path / 'other.safetensors'} does not say which network it is of"


def test_a_missing_file_and_a_broken_file_are_said(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(DataError, match="does not exist"):
        network().load(tmp_path / "absent.safetensors")
    with pytest.raises(DataError, match="is not a safetensors file"):
        network().load(tmp_path / "broken.safetensors")


def test_shared_parameters_are_saved_once(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    graph = Flow(layer).through(layer).build()
    path = graph.save(tmp_path / "tied.safetensors")
    expected = graph(X)
    nn.init.zeros_(layer.weight)
    assert torch.equal(graph.load(path)(X), expected)


def test_a_part_loads_into_a_sub_graph_with_a_report(tmp_path: Path) -> None:
    saved = network(head=3)
    graph = network(head=5)
    report = graph.load_part(saved.save(tmp_path / "net.safetensors"), into="encoder")
    assert torch.equal(graph.get_parameter("encoder.inner.weight"), saved.get_parameter("encoder.inner.weight"))
    assert str(report) == "7 loaded, 0 missing, 0 skipped"
    assert report.loaded[0] == "encoder.inner.weight"


def test_a_part_may_come_from_another_path(tmp_path: Path) -> None:
    saved = network()
    graph = Flow(nn.Linear(4, 8)).label("body").build()
    report = graph.load_part(saved.save(tmp_path / "net.safetensors"), into="body", source="encoder.inner")
    assert sorted(report.loaded) == ["body.bias", "body.weight"]
    assert torch.equal(graph.get_parameter("body.weight"), saved.get_parameter("encoder.inner.weight"))


def test_what_does_not_fit_is_skipped_and_what_is_not_there_is_missing(tmp_path: Path) -> None:
    path = network(head=3).save(tmp_path / "net.safetensors")
    other = Flow(nn.Linear(8, 5)).label("head").through(nn.Linear(5, 5)).label("extra").build()
    report = other.load_part(path)
    assert report.loaded == ()
    assert report.missing == ("head.weight", "head.bias", "extra.weight", "extra.bias")
    assert report.skipped[0] == ("encoder.inner.bias", "the graph has no such tensor")
    assert report.skipped[-1] == ("head.weight", "shape [3, 8] in the file, [5, 8] in the graph")


def test_a_source_that_is_not_in_the_file_is_said(tmp_path: Path) -> None:
    path = network().save(tmp_path / "net.safetensors")
    with pytest.raises(DataError) as caught:
        network().load_part(path, into="encoder", source="decoder")
    assert str(caught.value) == f"{path} has nothing at path 'decoder'\nhint: the top of the file is encoder, head"


def test_freeze_and_thaw_by_path() -> None:
    graph = network().freeze("encoder", "head.bias").thaw("encoder.norm")
    trained = [name for name, parameter in graph.named_parameters() if parameter.requires_grad]
    assert trained == ["encoder.norm.weight", "encoder.norm.bias", "head.weight"]


def test_freeze_without_a_path_freezes_everything() -> None:
    graph = network().freeze()
    assert not any(parameter.requires_grad for parameter in graph.parameters())


def test_an_unknown_path_changes_nothing_and_is_said() -> None:
    graph = network()
    with pytest.raises(ConfigError) as caught:
        graph.freeze("head", "encodr")
    assert str(caught.value) == "nothing is at path 'encodr'\nhint: did you mean 'encoder'?"
    assert all(parameter.requires_grad for parameter in graph.parameters())
