"""What `--output tabs` leaves in the notebook: plain HTML, bounded, with nothing of one rank in another's place."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.magics import html, tabs
from nbdist.magics.tabs import Tab, TabsScreen


class Pub:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def publish(self, **message: Any) -> None:
        self.sent.append(message)

    def clear_output(self, wait: bool) -> None:
        raise AssertionError("a rank's clear_output is its tab's alone")


class Shell:
    """A shell with a display publisher, in a terminal."""

    kernel = None

    def __init__(self) -> None:
        self.display_pub = Pub()


def shown(screen: TabsScreen, shell: Shell) -> dict[str, str]:
    screen.finish()
    return shell.display_pub.sent[-1]["data"]


def display(screen: TabsScreen, rank: int, data: dict[str, Any], **more: Any) -> None:
    screen.display(rank, {"msg_type": "display_data", "data": data, "metadata": {}, "transient": {}, **more})


class Tree(HTMLParser):
    """The text in each <details>, and whether every element that was opened was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "details":
            self.texts.append("")
        if tag not in html._VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "details" in self.open:
            self.texts[-1] += data


def test_each_rank_has_its_own_in_order() -> None:
    shell = Shell()
    screen = TabsScreen(shell, 0, range(2))
    for rank in range(2):
        screen.text(rank, "stdout", f"out <{rank}>\n".encode())
        screen.text(rank, "stderr", f"err {rank}\n".encode())
        display(screen, rank, {"text/plain": "<F>", "image/png": "aGk=\n"})
        screen.text(rank, "stdout", b"after")
    data = shown(screen, shell)
    assert data["text/plain"] == "rank 0\nout <0>\nerr 0\n<F>\nafter\n\nrank 1\nout <1>\nerr 1\n<F>\nafter"
    assert Tree(data["text/html"]).texts == ["rank 0out <0>err 0after", "rank 1out <1>err 1after"]
    assert data["text/html"].count('<img alt="&lt;F&gt;" src="data:image/png;base64,aGk=">') == 2
    assert data["text/html"].count("<details open") == 1
    assert not re.search(r"<script|<style|class=|<svg|onclick", data["text/html"])


def test_a_cell_without_output_shows_nothing() -> None:
    shell = Shell()
    TabsScreen(shell, 0, range(2)).finish()
    assert shell.display_pub.sent == []


def test_progress_bars_and_colours() -> None:
    shell = Shell()
    screen = TabsScreen(shell, 0, range(1))
    screen.text(0, "stderr", b"\r10%\r50%\r100%\n\x1b[1;31mred\x1b[0m \x1b[38;5;208morange\x1b[39m\x1b[2K")
    screen.text(0, "stdout", b"a\nb\x1b[1A\x1b[2K\rA\n\x1b[?25l")
    data = shown(screen, shell)
    assert "10%" not in data["text/plain"] and "100%" in data["text/plain"]
    assert "\x1b" not in data["text/plain"] + data["text/html"]
    assert data["text/plain"].splitlines()[-2:] == ["A", "b"]


def test_colours() -> None:
    assert html.coloured("\x1b[1;31mred\x1b[0m <b>") == (
        '<span style="font-weight:bold;color:#c62828">red</span> &lt;b&gt;'
    )
    assert html.coloured("\x1b[38;5;208mx\x1b[38;2;1;2;3my") == (
        '<span style="color:#ff8700">x</span><span style="color:#010203">y</span>'
    )
    assert html.coloured("\x1b[48;9;1mx\x1b]0;title\x07y\x1b[") == "xy"


def test_html_of_one_rank_cannot_swallow_the_next() -> None:
    shell = Shell()
    screen = TabsScreen(shell, 0, range(2))
    display(screen, 0, {"text/html": "</div></details><table><tr><td>cell<b>bold<br>", "text/plain": "x"})
    display(screen, 1, {"text/html": "<i>fine</i>&amp;&#233;", "text/plain": "y"})
    page = shown(screen, shell)["text/html"]
    assert Tree(page).texts == ["rank 0cellbold", "rank 1fine&é"]


@given(st.text(alphabet="<>/ab=\"'& !-", max_size=60))
def test_any_html_is_balanced(text: str) -> None:
    Tree(html.balanced(text))


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"image/svg+xml": "<svg/>", "text/plain": "s"}, 'src="data:image/svg+xml;base64,PHN2Zy8+"'),
        ({"image/jpeg": b"hi", "text/plain": "j"}, 'src="data:image/jpeg;base64,aGk="'),
        ({"text/markdown": "**b**", "text/plain": "<IPython>"}, "**b**"),
        ({"text/latex": "$a<b$", "text/plain": "<IPython>"}, "<div>$a&lt;b$</div>"),
        ({"application/json": {"a": [1]}, "text/plain": "<IPython.core.display.JSON object>"}, '"a": ['),
        ({"text/plain": "only <text>"}, "only &lt;text&gt;"),
    ],
)
def test_kinds_of_displays(data: dict[str, Any], wanted: str) -> None:
    assert wanted in html.rich(data, {})


def test_an_image_keeps_its_size() -> None:
    assert 'width="40" height="30"' in html.rich({"image/png": "aGk="}, {"image/png": {"width": 40, "height": 30}})


def test_updates_and_clear_output_are_the_ranks_own() -> None:
    shell = Shell()
    screen = TabsScreen(shell, 0, range(2))
    for rank in range(2):
        display(screen, rank, {"text/plain": "old"}, transient={"display_id": "x"})
    update = {"msg_type": "update_display_data", "transient": {"display_id": "x"}}
    display(screen, 1, {"text/plain": "new"}, **update)
    assert shown(screen, shell)["text/plain"] == "rank 0\nold\n\nrank 1\nnew"
    screen = TabsScreen(shell, 0, range(2))
    for rank in range(2):
        screen.text(rank, "stdout", b"a\n")
    screen.display(1, {"msg_type": "clear_output", "wait": True})
    assert screen._tabs[1].plain() == "a"
    screen.text(1, "stdout", b"b\n")
    assert shown(screen, shell)["text/plain"] == "rank 0\na\n\nrank 1\nb"


def test_what_updates_another_cells_display_goes_through_from_the_lead_alone() -> None:
    shell = Shell()
    screen = TabsScreen(shell, 0, range(2))
    for rank in range(2):
        display(screen, rank, {"text/plain": "new"}, msg_type="update_display_data", transient={"display_id": "before"})
    assert [(one["update"], one["transient"]) for one in shell.display_pub.sent] == [(True, {"display_id": "before"})]


def test_a_rank_that_prints_100_megabytes_keeps_the_last_lines() -> None:
    tab = Tab()
    block = b"".join(b"%06d " % i + b"x" * 92 + b"\n" for i in range(10_000))
    for _ in range(100):
        tab.text("stdout", block)
    kept = tab.plain().splitlines()
    assert kept[0].startswith(
        f"({1_000_000 - tabs.MOST_LINES:,} earlier lines not kept: a tab holds the last 20,000 lines"
    )
    assert "--output merged" in kept[0] and len(kept) == tabs.MOST_LINES + 1
    assert kept[-1].startswith("009999") and len(tab.html()) < 4_000_000
    tab.text("stdout", b"y" * 2_500_000 + b"\nz\n")
    assert len(tab.plain()) < 2_600_000 and tab.plain().endswith("z")


def test_many_displays_keep_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabs, "MOST_SHOWN", 1000)
    tab = Tab()
    for number in range(20):
        tab.display({"msg_type": "display_data", "data": {"text/plain": f"{number:0100}"}, "transient": {}})
    assert tab.plain().startswith("(10 earlier displays not kept: a tab holds") and tab.plain().endswith("19")
