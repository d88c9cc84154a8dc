"""How N ranks' output becomes one."""

from __future__ import annotations

import pytest

from nbdist.launchers.screen import MergedScreen


class Page:
    def __init__(self, mode: str = "merged", lead: int = 0) -> None:
        self.written: list[tuple[str, str]] = []
        self.shown: list[dict] = []
        self.screen = MergedScreen(
            mode, lead, lambda stream, text: self.written.append((stream, text)), self.shown.append
        )

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for where, text in self.written if where == stream)

    def say(self, rank: int, text: str, stream: str = "stdout") -> None:
        self.screen.text(rank, stream, text.encode())


def test_the_lead_rank_is_written_as_it_comes() -> None:
    page = Page()
    for piece in ("a", "b\r", "c\n"):
        page.say(0, piece)
    assert [text for _, text in page.written] == ["a", "b\r", "c\n"]


def test_other_ranks_lines_have_their_rank_in_front() -> None:
    page = Page()
    page.say(1, "one\ntwo\n")
    assert page.text() == "[rank 1] one\n[rank 1] two\n"


def test_a_line_in_pieces_is_one_line() -> None:
    page = Page()
    for piece in ("on", "e", "\n"):
        page.say(1, piece)
    assert page.text() == "[rank 1] one\n"


def test_another_rank_never_breaks_into_the_lead_ranks_line() -> None:
    page = Page()
    page.say(0, "loss ")
    page.say(1, "hello\n")
    assert page.text() == "loss "
    page.say(0, "0.5\nnext")
    assert page.text() == "loss 0.5\n[rank 1] hello\nnext"


def test_it_waits_only_so_long_for_the_lead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdist.launchers import screen

    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    page = Page()
    page.say(0, "bar 10%")
    page.say(1, "hello\n")
    page.screen.tick()
    assert page.text() == "bar 10%"
    now[0] = 1.0
    page.screen.tick()
    assert page.text() == "bar 10%\n[rank 1] hello\n"


def test_a_progress_bar_of_another_rank_is_one_line() -> None:
    page = Page()
    for percent in range(0, 101, 10):
        page.say(1, f"\r{percent}%", "stderr")
    page.screen.finish()
    assert page.text("stderr") == "[rank 1] 100%\n"


def test_an_unfinished_line_is_not_lost() -> None:
    page = Page()
    page.say(1, "no newline")
    page.screen.finish()
    assert page.text() == "[rank 1] no newline\n"


def test_a_character_cut_in_two_by_a_read() -> None:
    page = Page()
    raw = "é".encode()
    page.screen.text(0, "stdout", raw[:1])
    page.screen.text(0, "stdout", raw[1:])
    assert page.text() == "é"


def test_rank0_and_none() -> None:
    for mode, wanted in (("rank0", "here\n"), ("none", "")):
        page = Page(mode)
        page.say(0, "here\n")
        page.say(1, "there\n")
        page.screen.display(0, {"data": {"text/plain": "x"}})
        page.screen.finish()
        assert page.text() == wanted
        assert bool(page.shown) == (mode == "rank0")


def test_with_ranks_the_lowest_that_runs_leads() -> None:
    page = Page(lead=2)
    page.say(2, "I lead\n")
    page.say(3, "I do not\n")
    assert page.text() == "I lead\n[rank 3] I do not\n"


def test_a_display_of_another_rank_is_its_text() -> None:
    page = Page()
    page.screen.display(1, {"msg_type": "display_data", "data": {"text/plain": "<Figure>", "image/png": "..."}})
    assert page.text() == "[rank 1] <Figure>\n"
    assert not page.shown


def test_a_notice_starts_a_line_of_its_own() -> None:
    page = Page()
    page.say(0, "bar", "stderr")
    page.screen.notice("hello")
    assert page.text("stderr") == "bar\nnbdist: hello\n"
