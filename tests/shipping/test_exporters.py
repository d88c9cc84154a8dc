"""The registry through which wrappers say how they travel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.shipping import CannotShip, RankedValue, exporters, register_exporter

from .peers import Notebook


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    by_type, by_name = dict(exporters._BY_TYPE), dict(exporters._BY_NAME)
    yield
    exporters._BY_TYPE.clear()
    exporters._BY_TYPE.update(by_type)
    exporters._BY_NAME.clear()
    exporters._BY_NAME.update(by_name)
    exporters._version[0] += 1


def on_ranks(nb: Notebook, source: str) -> None:
    for remote in nb.remotes:
        remote.ask("execute", source)


def test_stays(nb: Notebook) -> None:
    on_ranks(
        nb,
        "from nbdist.shipping import register_exporter; register_exporter('__main__.Acc', stays='it is the rank\\'s')",
    )
    nb.cell("class Acc: pass\nclass Sub(Acc): pass\na=Sub(); b=1; inside=[a]")
    assert isinstance(nb["a"], RankedValue) and "it is the rank's" in repr(nb["a"]) and nb["b"] == 1
    assert isinstance(nb["inside"], RankedValue) and "inside[0]" in repr(nb["inside"])
    nb.cell("r=type(a).__name__")
    assert nb["r"] == "Sub"


def test_stays_in_the_notebook(nb: Notebook) -> None:
    register_exporter("__main__.Mine", stays="it belongs here")
    nb.here("class Mine: pass\nm=[Mine()]")
    with pytest.raises(CannotShip, match=r"m\[0\] is a Mine: it belongs here"):
        nb.cell("m")


def test_unwrap_and_strip(nb: Notebook) -> None:
    on_ranks(
        nb,
        "from nbdist.shipping import register_exporter; register_exporter('__main__.Wrap', unwrap=lambda w: w.inner)\n"
        "register_exporter('__main__.Inner', strip=lambda d: [n for n in d if n.startswith('rank_')])",
    )
    nb.here("class Inner: pass\nx=Inner(); x.v=1; x0=x")
    nb.cell("class Wrap:\n  def __init__(s,i): s.inner=i\nx.rank_only=(i for i in ()); x.v=2; x=Wrap(x)")
    assert nb["x"] is nb["x0"] and nb["x"].v == 2 and not hasattr(nb["x"], "rank_only")
    nb.here("x.v=3")
    nb.cell("r=(type(x).__name__, x.inner.v, hasattr(x.inner,'rank_only'))")
    assert nb["r"] == ("Wrap", 3, True)
