"""The bar of a notebook: it shows the fraction and the words, stays while the program prints, and goes at the end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.api.notebook_bar import NotebookBar, TextOutput, WidgetOutput, in_notebook
from outrider.api.run_talk import RunTalk


class FakeWidget:
    def __init__(self, children: Any = (), **values: Any) -> None:
        self.children, self.value, self.is_closed = children, None, False

    def close(self) -> None:
        self.is_closed = True


WIDGETS = SimpleNamespace(FloatProgress=FakeWidget, Label=FakeWidget, HBox=FakeWidget)


def test_the_widget_is_displayed_once_and_then_changed() -> None:
    displayed: list[Any] = []
    bar = NotebookBar(WidgetOutput(WIDGETS, displayed.append), clock=lambda: 0.0)
    bar.say("starting 2 ranks")
    bar.show("epoch 1/2", 0.25, loss=1.5)
    bar.clear()
    (box,) = displayed
    progress, words = box.children
    assert progress.value == 0.25
    assert words.value.split() == ["epoch", "1/2", "25%", "loss", "1.500"]
    assert not box.is_closed
    bar.close()
    assert box.is_closed
    assert progress.is_closed


def test_text_is_replaced_in_its_place() -> None:
    texts: list[str] = []
    shown = SimpleNamespace(update=lambda content, raw: texts.append(content["text/plain"]))

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        texts.append(f"first: {content['text/plain']}")
        return shown

    bar = NotebookBar(TextOutput(display), clock=lambda: 0.0)
    bar.say("starting")
    bar.show("epoch 1/2", 0.5)
    bar.close()
    assert texts[0] == "first: starting"
    assert texts[1].startswith("epoch 1/2  [############............]")
    assert texts[2] == ""


def test_only_a_shell_with_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, is_notebook in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert in_notebook() is is_notebook


def test_a_quiet_run_has_no_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert RunTalk.open(True).bar is None
