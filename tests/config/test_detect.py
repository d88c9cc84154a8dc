"""How many ranks, on what, and why. GPUs are numbers here: there is none on the machine that runs this."""

from __future__ import annotations

import pytest

from nbdist.config.cores import cores
from nbdist.config.detect import NotEnoughDevices, choose_ranks, parse_gpus
from nbdist.config.gpus import Devices, combine

MPS = Devices("mps", ("0",), "MPS, the Apple GPU, serves one rank: torch has no collectives on it")


def gpus(count: int, **environment: str) -> Devices:
    return combine(environment, count)


@pytest.mark.parametrize(
    ("asked", "there", "wanted"),
    [
        ({}, 8, (8, "cuda", tuple("01234567"))),
        ({"ranks": 2}, 8, (2, "cuda", ("0", "1"))),
        ({"ranks": 4}, 2, (4, "cpu", ())),
        ({"ranks": 2}, 0, (2, "cpu", ())),
        ({"cpus": 3}, 8, (3, "cpu", ())),
        ({"gpus": 2}, 8, (2, "cuda", ("0", "1"))),
        ({"gpus": (2, 0)}, 8, (2, "cuda", ("2", "0"))),
        ({"gpus": [3]}, 8, (1, "cuda", ("3",))),
    ],
)
def test_with_a_mocked_number_of_gpus(asked: dict, there: int, wanted: tuple[int, str, tuple[str, ...]]) -> None:
    choice = choose_ranks(**asked, devices=lambda: gpus(there))
    assert (choice.ranks, choice.device, choice.devices) == wanted
    assert choice.reason
    assert choice.surprise == (asked == {"ranks": 4})
    if choice.surprise:
        assert choice.reason == "-n 4, and this machine has only 2 GPUs"


def test_indices_are_into_what_is_visible_of_mocked_gpus() -> None:
    """As torch does: with CUDA_VISIBLE_DEVICES=4,6,7 the GPU 2 is the one that the driver calls 7."""
    visible = gpus(3, CUDA_VISIBLE_DEVICES="4,6,7")
    assert choose_ranks(gpus=(2, 0), devices=lambda: visible).devices == ("7", "4")
    assert choose_ranks(devices=lambda: visible).devices == ("4", "6", "7")
    with pytest.raises(NotEnoughDevices, match=r"--gpus 4,6: there is no GPU 4; these are GPUs 0 to 2 \(CUDA_VIS"):
        choose_ranks(gpus=(4, 6), devices=lambda: visible)


def test_without_gpus_and_options_the_cores_decide() -> None:
    choice = choose_ranks(devices=lambda: gpus(0))
    assert (choice.ranks, choice.device) == (max(2, cores().usable), "cpu")
    assert "no GPU" in choice.reason and "core" in choice.reason


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (gpus(0), "this machine has no GPU. Use --cpus 8 to run 8 ranks"),
        (gpus(2), "this machine has 2 GPUs. Use --gpus 2, or --cpus 8"),
        (gpus(0, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES is empty, which hides every GPU. Use --cpus 8"),
        (gpus(0, CUDA_VISIBLE_DEVICES="junk"), "CUDA_VISIBLE_DEVICES=junk: 'junk' is no device. Use --cpus 8"),
        (gpus(1, CUDA_VISIBLE_DEVICES="3"), "1 GPU here: CUDA_VISIBLE_DEVICES=3. Use --gpus 1, or --cpus 8"),
        (MPS, "1 GPU here: MPS, the Apple GPU, serves one rank: .*. Use --gpus 1, or --cpus 8"),
    ],
)
def test_too_many_mocked_gpus(there: Devices, says: str) -> None:
    with pytest.raises(NotEnoughDevices, match=f"^--gpus 8: {says}"):
        choose_ranks(gpus=8, devices=lambda: there)


def test_mps_mocked_takes_one_rank_and_says_why() -> None:
    for asked in ({}, {"ranks": 1}, {"gpus": 1}, {"gpus": (0,)}):
        choice = choose_ranks(**asked, devices=lambda: MPS)
        assert (choice.ranks, choice.device) == (1, "mps")
        assert "serves one rank" in choice.reason
    several = choose_ranks(ranks=2, devices=lambda: MPS)
    assert (several.ranks, several.device, several.surprise) == (2, "cpu", True)
    assert "serves one rank" in several.reason


def test_cpus_never_asks_for_gpus() -> None:
    def look() -> Devices:
        raise AssertionError("asked")

    assert choose_ranks(cpus=2, devices=look).device == "cpu"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("2", 2), ("0,2", (0, 2)), ("2,0", (2, 0)), ("3,", (3,)), ("cuda:3", (3,)), ("0-2,5", (0, 1, 2, 5)),
     ("cuda:1,cuda:0", (1, 0))],
)  # fmt: skip
def test_gpus_by_number_or_by_index(text: str, wanted: int | tuple[int, ...]) -> None:
    assert parse_gpus(text) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "GPU 0 alone is `--gpus 0,`"),
        ("0,0", "GPU 0 is there twice"),
        ("0-2,1", "GPU 1 is there twice"),
        ("-1", "one alone: 3, with its comma"),
        ("2-0", "takes a number of GPUs"),
        ("0,x", "takes a number of GPUs"),
        (",", "takes a number of GPUs"),
        ("", "takes a number of GPUs"),
    ],
)
def test_wrong_gpus(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_gpus(text)


@pytest.mark.parametrize("asked", [{"gpus": [0, 0]}, {"gpus": [-1]}, {"gpus": []}, {"gpus": 0}, {"gpus": -1}])
def test_wrong_gpus_as_arguments(asked: dict) -> None:
    with pytest.raises(ValueError, match="--gpus"):
        choose_ranks(**asked, devices=lambda: gpus(8))
