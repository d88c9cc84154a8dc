"""How many ranks, on what, and why. GPUs are a number here: there is none on the machine that runs this."""

from __future__ import annotations

import pytest

from nbdist.config.detect import NotEnoughDevices, choose_ranks, physical_cores


@pytest.mark.parametrize(
    ("asked", "gpus", "wanted"),
    [
        ({}, 8, (8, "cuda")),
        ({"ranks": 2}, 8, (2, "cuda")),
        ({"ranks": 4}, 2, (4, "cpu")),
        ({"ranks": 2}, 0, (2, "cpu")),
        ({"cpus": 3}, 8, (3, "cpu")),
        ({"gpus": 2}, 8, (2, "cuda")),
    ],
)
def test_with_a_mocked_number_of_gpus(asked: dict, gpus: int, wanted: tuple[int, str]) -> None:
    *chosen, reason = choose_ranks(**asked, count_gpus=lambda: gpus)
    assert tuple(chosen) == wanted
    assert reason


def test_without_gpus_and_options_the_cores_decide() -> None:
    size, device, reason = choose_ranks(count_gpus=lambda: 0)
    assert (size, device) == (max(2, physical_cores()), "cpu")
    assert "cores" in reason


@pytest.mark.parametrize(
    ("there", "says"), [(0, "has no GPU. Use --cpus 8"), (2, "has 2 GPUs. Use --gpus 2, or --cpus 8")]
)
def test_too_many_gpus(there: int, says: str) -> None:
    with pytest.raises(NotEnoughDevices, match=says):
        choose_ranks(gpus=8, count_gpus=lambda: there)


def test_cpus_never_asks_for_gpus() -> None:
    def count() -> int:
        raise AssertionError("asked")

    assert choose_ranks(cpus=2, count_gpus=count)[:2] == (2, "cpu")
