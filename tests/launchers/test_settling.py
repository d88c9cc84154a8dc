"""Between cells: what is said of those that never ended."""

from __future__ import annotations

import pytest

from nbdist.launchers.settling import imported


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import signal, os.path as p\nfrom a.b import c\nx = 1", {"signal", "p", "c"}),
        ("import xml.dom", {"xml"}),
        ("import signal\nsignal = 3", set()),  # a value of the cell's own
        ("no python", set()),
    ],
)
def test_what_is_only_imported_is_no_loss(code: str, names: set[str]) -> None:
    assert imported(code) == names
