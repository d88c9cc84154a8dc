"""TAB behind the magics, as a frontend asks for it."""

from __future__ import annotations

import pytest

from tests.kernel.notebook import Notebook

pytestmark = pytest.mark.kernel


def complete(nb: Notebook, code: str, cursor: int | None = None) -> set[str]:
    """What the frontend would put in place of the word at the cursor: whole lines, so that it can be compared."""
    message = nb.client.complete(code, len(code) if cursor is None else cursor)
    while True:
        reply = nb.client.get_shell_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == message:
            content = reply["content"]
            return {code[: content["cursor_start"]] + match for match in content["matches"]}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("%%distributed --out", {"%%distributed --output"}),
        ("%%distributed --o", {"%%distributed --output"}),
        ("%%distributed --re", {"%%distributed --return", "%%distributed --return-limit"}),
        ("%%distributed -n 2 --fr", {"%%distributed -n 2 --fresh"}),
        ("%distributed on --mixed-precision b", {"%distributed on --mixed-precision bf16"}),
        ("%distributed on --backend f", {"%distributed on --backend fsdp"}),
        ("%%distributed --output t", {"%%distributed --output tabs"}),
        ("%%distributed --output=rank", {"%%distributed --output=rank0"}),
        ("%%distributed --return mine_", {"%%distributed --return mine_one", "%%distributed --return mine_two"}),
        ("%%distributed --return mine_one,mine_t", {"%%distributed --return mine_one,mine_two"}),
        ("%distributed st", {"%distributed status", "%distributed stop"}),
        ("%distributed o", {"%distributed on", "%distributed off"}),
        ("%distributed on --tim", {"%distributed on --timeout"}),
        ("%distributed pull stays_th", {"%distributed pull stays_there"}),
        ("%distributed pull mine_", {"%distributed pull mine_one", "%distributed pull mine_two"}),
    ],
)
def test_what_is_offered(nb: Notebook, code: str, lines: set[str]) -> None:
    nb.ok("mine_one = mine_two = 1")
    if "pull" in code:
        nb.ranks("stays_there = (i for i in range(3))")
    assert complete(nb, code) == lines


def test_every_option_is_offered_and_none_twice(nb: Notebook) -> None:
    offered = complete(nb, "%%distributed --timeout 3 ")
    assert {"%%distributed --timeout 3 " + option for option in ("-n", "--gpus", "--env", "--fresh")} <= offered
    assert "%%distributed --timeout 3 --timeout" not in offered


def test_the_cells_own_lines_are_completed_as_ever(nb: Notebook) -> None:
    nb.ok("mine_one = mine_two = 1")
    found = complete(nb, "%%distributed -n 2\nmine_o")
    assert any(line.endswith("mine_one") for line in found)
    code = "%%distributed --out\nx = 1"
    assert any(line.endswith("--output") for line in complete(nb, code, cursor=len("%%distributed --out")))


def test_after_unloading_nothing_is_offered(fresh: Notebook) -> None:
    fresh.ok("%unload_ext nbdist")
    assert not any("--output" in line for line in complete(fresh, "%%distributed --out"))
