"""Every page of docs/ is a notebook: its examples run in a real kernel, and show what the page says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kernel.notebook import Cell, Notebook

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r'(?:<!-- stop: "(?P<stop>[^"]+)" -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$', re.M | re.S)


@dataclass
class Example:
    line: int
    code: str
    shows: list[str] | None = None  # `...` in a line stands for anything
    stop: str | None = None  # press the button once the cell has shown this

    @property
    def fails(self) -> bool:
        return bool(self.shows and re.match(r"[A-Z]\w+: ", self.shows[0]))


def examples(page: Path) -> list[Example]:
    """The page's ```python blocks, each with the ```text block behind it."""
    text, found, last = page.read_text(), [], 0
    for block in _BLOCK.finditer(text):
        if block["kind"] == "python":
            line = text.count("\n", 0, block.start("text")) + 1
            found.append(Example(line, block["text"].rstrip(), stop=block["stop"]))
        elif block["kind"] == "text" and found and not text[last : block.start()].strip():
            found[-1].shows = block["text"].splitlines()
        last = block.end()
    return found


def shown(cell: Cell) -> list[str]:
    results = [data.get("text/plain", "") for data in cell.data]
    return [line for line in "\n".join([cell.stdout, cell.stderr, *results]).splitlines() if line.strip()]


def is_as_told(told: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, told.split("..."))), line) is not None


def check(page: Path, example: Example, cell: Cell) -> None:
    where = f"{page.name}:{example.line}"
    assert (cell.status == "error") == example.fails, f"{where}: {cell.text}"
    if example.fails:
        assert cell.error is not None and example.shows is not None
        lines = [f"{cell.error[0]}: {cell.error[1]}", *cell.traceback.splitlines()]
        for told in example.shows:
            assert any(is_as_told(told, line) for line in lines), f"{where}: not shown: {told}\n{cell.text}"
        return
    lines = shown(cell)
    if example.shows is None:
        assert not lines, f"{where}: shows {lines}, of which the page says nothing"
        return
    wanted = [told for told in example.shows if told.strip()]
    assert len(wanted) == len(lines), f"{where}: {lines}"
    for told in wanted:  # the ranks' lines have no order between them
        assert any(is_as_told(told, line) for line in lines), f"{where}: not shown: {told}\nbut {lines}"


PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.kernel
@pytest.mark.ranks
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_the_examples_run_and_show_what_is_said(page: Path) -> None:
    with Notebook() as nb:
        for example in examples(page):
            stop = None if example.stop is None else (lambda cell, word=example.stop: word in cell.stdout)
            check(page, example, nb.run(example.code, stop_when=stop))


def test_a_page_that_says_something_else_is_caught() -> None:
    example = Example(1, "1 + 1", ["3"])
    with pytest.raises(AssertionError, match="not shown: 3"):
        check(DOCS / "page.md", example, Cell(data=[{"text/plain": "2"}], status="ok"))
    with pytest.raises(AssertionError, match="the page says nothing"):
        check(DOCS / "page.md", Example(1, "1 + 1"), Cell(stdout="2\n", status="ok"))
    with pytest.raises(AssertionError):
        check(DOCS / "page.md", Example(1, "1 / 0"), Cell(status="error"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
