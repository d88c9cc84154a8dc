"""How N ranks' output becomes one."""

from __future__ import annotations

import pytest

from nbdist.launchers import screen
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
    page.screen.finish()
    assert page.text() == "[1] one\n[1] two\n"


def test_a_line_in_pieces_is_one_line() -> None:
    page = Page()
    for piece in ("on", "e", "\n"):
        page.say(1, piece)
    page.screen.finish()
    assert page.text() == "[1] one\n"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    from nbdist.launchers import screen

    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    return now


def test_another_rank_never_breaks_into_the_lead_ranks_line(now: list[float]) -> None:
    page = Page()
    page.say(1, "hello\n")
    now[0] = 10.0
    page.say(0, "loss ")
    page.screen.tick()
    now[0] = 10.15
    page.screen.tick()
    assert page.text() == "loss "
    page.say(0, "0.5\nnext")
    assert page.text() == "loss 0.5\n[1] hello\nnext"


def test_it_waits_only_so_long_for_the_lead_rank(now: list[float]) -> None:
    page = Page()
    page.say(0, "bar 10%")
    page.say(1, "hello\n")
    for now[0] in (0.1, 2.0, 2.15):
        page.screen.tick()
        assert page.text() == "bar 10%"
    for now[0] in (3.0, 3.3, 3.6):
        page.screen.tick()
    assert page.text() == "bar 10%\n[1] hello\n"


def test_a_progress_bar_of_another_rank_is_one_line() -> None:
    page = Page()
    for percent in range(0, 101, 10):
        page.say(1, f"\r{percent}%", "stderr")
    page.screen.finish()
    assert page.text("stderr") == "[1] 100%\n"


def test_an_unfinished_line_is_not_lost() -> None:
    page = Page()
    page.say(1, "no newline")
    page.screen.finish()
    assert page.text() == "[1] no newline\n"


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
    page.screen.finish()
    assert page.text() == "I lead\n[3] I do not\n"


def figure(image: str) -> dict:
    return {
        "msg_type": "display_data",
        "data": {"text/plain": "<Figure>", "image/png": image},
        "metadata": {},
        "transient": {},
    }


def test_a_display_that_differs_from_rank_0s_is_shown_once_for_all_that_share_it() -> None:
    page = Page()
    page.screen.display(0, figure("a"))
    page.screen.display(1, figure("a"))
    page.screen.display(2, figure("b"))
    page.screen.display(3, figure("c"))
    page.screen.display(4, figure("b"))
    page.screen.finish()
    assert page.text() == "[2,4]\n[3]\n"
    assert [message["data"] for message in page.shown] == [figure(name)["data"] for name in "abc"]


def html(page: str, name: str | None = None, kind: str = "display_data") -> dict:
    data = {"text/plain": "<HTML object>", "text/html": page}
    return {"msg_type": kind, "data": data, "metadata": {}, "transient": {"display_id": name} if name else {}}


def test_a_display_that_rank_0_has_not_is_shown_under_its_rank() -> None:
    page = Page()
    for rank in (0, 1, 2):
        page.screen.display(rank, html("same"))
    for rank in (1, 2):
        page.screen.display(rank, figure("plot"))
    page.screen.display(2, html("mine"))
    page.screen.finish()
    assert page.text() == "[1-2]\n[2]\n"
    assert [list(message["data"].values())[1] for message in page.shown] == ["same", "plot", "mine"]


def test_what_differs_from_rank_0s_at_the_same_place_is_shown_richly() -> None:
    page = Page()
    for rank in (0, 1):
        table = {"text/plain": f"   a\n0  {rank + 5}", "text/html": f"<table>{rank}"}
        page.screen.display(rank, {**html(""), "data": table})
        page.screen.display(rank, html(f"page of {rank}"))
    page.screen.finish()
    assert page.text() == "[1]\n[1]\n"
    assert [m["data"]["text/html"] for m in page.shown] == ["<table>0", "page of 0", "<table>1", "page of 1"]


def test_so_many_displays_of_one_rank_and_then_their_text() -> None:
    page = Page()
    for cell in range(2):
        for number in range(screen.RICH + 2):
            page.screen.display(1, html(f"{cell} {number}"))
        page.screen.finish()
        assert len(page.shown) == screen.RICH * (cell + 1)
        assert page.text().count(
            "[1] <HTML object> (more than 20 displays: run with --output all to see it)\n"
        ) == 2 * (cell + 1)


def test_an_updated_display_of_another_rank_is_the_latest_and_goes_on() -> None:
    page = Page()
    page.screen.display(1, html("0%", "bar"))
    page.screen.display(1, html("50%", "bar", "update_display_data"))
    page.screen.finish()
    page.screen.display(1, html("100%", "bar", "update_display_data"))
    page.screen.display(1, html("x", "unknown", "update_display_data"))
    shown = [(m["msg_type"], m["transient"]["display_id"], m["data"]["text/html"]) for m in page.shown]
    assert shown[-1] == ("update_display_data", "bar-rank1", "100%") and len(shown) == 2


def test_text_of_many_lines_has_its_rank_on_each() -> None:
    page = Page()
    page.screen.display(1, {"data": {"text/plain": "   a\n0  1"}})
    page.screen.finish()
    assert page.text() == "[1]    a\n[1] 0  1\n"


def test_a_printed_line_is_no_display() -> None:
    page = Page()
    page.screen.display(0, {"data": {"text/plain": "x"}})
    page.say(1, "x\n")
    page.screen.finish()
    assert page.text() == "[1] x\n"


# ------------------------------------------------------------------ folding


def test_equal_lines_need_no_word() -> None:
    page = Page()
    for rank in (1, 0, 2):
        page.say(rank, "a\nb\n")
        page.say(rank, "problem\n", "stderr")
    page.screen.finish()
    assert (page.text(), page.text("stderr")) == ("a\nb\n", "problem\n")


def test_lines_equal_but_for_the_rank_are_told_in_one_line() -> None:
    page = Page()
    for rank in range(8):
        page.say(rank, f"rank {rank} of 8\n" * 1000)
    page.screen.finish()
    assert page.text() == "rank 0 of 8\n" * 1000 + "[1-7] the same 1,000 lines but for the rank\n"
    page.screen.finish()
    assert page.text().count("the same") == 1


def test_a_value_that_happens_to_be_the_ranks_is_shown() -> None:
    page = Page()
    for rank in range(4):
        page.say(rank, f"loss 0.{rank}\n")
    page.screen.finish()
    assert page.text() == "loss 0.0\n[1] loss 0.1\n[2] loss 0.2\n[3] loss 0.3\n"


def test_progress_bars_that_differ_in_speed_are_one_and_need_no_word() -> None:
    page = Page()
    for rank in range(4):
        for done in range(5):
            page.say(rank, f"\r{done}/4 [00:0{rank}<00:00, {rank + 1}.5it/s]", "stderr")
        page.say(rank, "\n", "stderr")
    page.screen.finish()
    assert page.text("stderr").endswith("4/4 [00:00<00:00, 1.5it/s]\n") and "[1" not in page.text("stderr")
    assert page.text() == ""


def test_stdout_and_stderr_are_apart() -> None:
    page = Page()
    page.say(0, "x\n")
    page.say(1, "x\n", "stderr")
    page.screen.finish()
    assert (page.text(), page.text("stderr")) == ("x\n", "[1] x\n")


# ------------------------------------------------------------------ all


def test_all_puts_the_ranks_in_front_of_every_line() -> None:
    page = Page("all")
    for rank in range(3):
        page.say(rank, f"hello {rank}\nloss 0.{rank}\n" + ("more\n" if rank else "") + "end")
    page.screen.finish()
    lines = ["[0-2] hello 0", "[0] loss 0.0", "[1] loss 0.1", "[2] loss 0.2", "[1-2] more", "[0-2] end"]
    assert page.text().splitlines() == [*lines, "[1-2] the same 1 line but for the rank"]


def test_all_shows_displays_richly_under_a_label() -> None:
    page = Page("all")
    for rank, image in enumerate("aab"):
        page.screen.display(rank, figure(image))
    page.screen.finish()
    assert page.text() == "[0-1]\n[2]\n"
    assert [message["data"]["image/png"] for message in page.shown] == ["a", "b"]


def test_all_keeps_the_ranks_updatable_displays_apart() -> None:
    page = Page("all")
    for rank in range(2):
        page.screen.display(rank, {**figure("a"), "transient": {"display_id": "x"}})
        page.screen.display(rank, {**figure("b"), "msg_type": "update_display_data", "transient": {"display_id": "x"}})
    page.screen.finish()
    assert page.text() == "[0]\n[1]\n"
    told = [(message["msg_type"], message["transient"]["display_id"]) for message in page.shown]
    assert sorted(told) == sorted(
        (kind, name) for kind in ("display_data", "update_display_data") for name in ("x", "x-rank1")
    )


def test_a_notice_starts_a_line_of_its_own() -> None:
    page = Page()
    page.say(0, "bar", "stderr")
    page.screen.notice("hello")
    assert page.text("stderr") == "bar\nnbdist: hello\n"


def clear(rank: int, page: Page) -> None:
    page.screen.display(rank, {"msg_type": "clear_output", "wait": True})


def test_another_ranks_display_replaces_its_last_after_it_cleared_the_output() -> None:
    page = Page()
    for frame in range(30):  # more than are shown of one rank as they are
        clear(1, page)
        page.screen.display(1, figure(str(frame)))
        page.screen.finish()
    kinds = [message["msg_type"] for message in page.shown]
    assert kinds == ["display_data"] + ["update_display_data"] * 29 and page.text() == "[1]\n"
    assert len({message["transient"]["display_id"] for message in page.shown}) == 1
    clear(0, page)  # all are gone
    clear(1, page)
    page.screen.display(1, figure("new"))
    page.screen.finish()
    assert page.shown[-1]["msg_type"] == "display_data" and page.text() == "[1]\n[1]\n"
