"""docs/porting.md names what is there and what is not: both are tried."""

from __future__ import annotations

import re

import pytest

import nbdist
import nbdist.utils
from nbdist import Accelerator, PartialState
from tests.docs.test_pages import DOCS

PAGE = (DOCS / "porting.md").read_text()
HOMES = {
    "from `nbdist`": lambda: nbdist,
    "from `nbdist.utils`": lambda: nbdist.utils,
    "members of the `Accelerator`": Accelerator,
    "members of `PartialState`": PartialState,
}


def listed(there: bool) -> list[tuple[str, str]]:
    """(where, name) of the lists of what is there, or of what is not yet."""
    found = []
    names = PAGE.split("## Name by name")[1].split("## Example")[0]
    for paragraph in names.split("\n\n"):
        head, _, rest = paragraph.strip().partition("`: ")
        head = " ".join(f"{head}`".split())
        for where in HOMES:
            if head.lower().endswith(where.lower()) and ("not yet" in head.lower()) is not there:
                found += [(where, name) for name in re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", rest))]
    return found


def test_the_lists_are_read() -> None:
    assert {where for where, _ in listed(True)} == set(HOMES)
    assert len(listed(True)) > 100 and len(listed(False)) > 40


@pytest.mark.parametrize("where", HOMES)
def test_what_is_there_is_there(where: str) -> None:
    home = HOMES[where]()
    assert [name for at, name in listed(True) if at == where and name not in dir(home)] == []


@pytest.mark.parametrize("where", HOMES)
def test_what_is_not_yet_there_is_not(where: str) -> None:
    home = HOMES[where]()
    for name in [name for at, name in listed(False) if at == where]:
        with pytest.raises(AttributeError, match=rf"{name} is not available in this version of nbdist yet"):
            getattr(home, name)


def test_arguments_that_are_not_yet_there_are_refused_by_name() -> None:
    [told] = re.findall(r"Not yet, arguments of the `Accelerator`: (.*?);", PAGE, re.S)
    names = re.findall(r"`(\w+)`", told)
    assert len(names) == 4
    for name in names:
        with pytest.raises(NotImplementedError, match=name):
            Accelerator(**{name: object()})
    with pytest.raises(NotImplementedError, match="fp8"):
        Accelerator(mixed_precision="fp8")


def test_every_public_name_is_listed() -> None:
    told = {name for _, name in listed(True)} | set(re.findall(r"`(\w+)`", PAGE))
    assert {*nbdist.__all__, *nbdist.utils.__all__} - told - {"launch"} == set()
