"""What surrounds a cell is rebuilt, never patched up: nothing of one cell reaches the next."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.worker import environment
from nbdist.worker.environment import Surroundings, rank_variables


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    variables, path, argv, folder = dict(os.environ), list(sys.path), list(sys.argv), os.getcwd()
    yield
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:], sys.argv[:] = path, argv
    os.chdir(folder)


def spec(folder: Path, **variables: str) -> dict[str, Any]:
    around = {
        "environment": {"PATH": os.environ["PATH"], "HOME": "/", **variables},
        "folder": str(folder),
        "path": ["/notebook"],
        "argv": ["kernel"],
    }
    return {
        "rank": 1,
        "world_size": 4,
        "pool": "pool1",
        "port": 1234,
        "device": "cpu",
        "threads": 2,
        "surroundings": around,
    }


def test_the_notebooks_and_the_ranks_own(tmp_path: Path) -> None:
    os.environ["LEFT_BY_THE_FORK_SERVER"] = "1"
    assert Surroundings(spec(tmp_path, MINE="yes")).restore({}) is None
    assert os.environ["MINE"] == "yes"
    assert "LEFT_BY_THE_FORK_SERVER" not in os.environ
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]) == ("1", "4", "1234")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert (sys.path, sys.argv, os.getcwd()) == (["/notebook"], ["kernel"], str(tmp_path))


def test_the_rank_wins_over_the_notebook_but_for_threads(tmp_path: Path) -> None:
    """A notebook that was itself started under torchrun, and one whose user has chosen the threads."""
    Surroundings(spec(tmp_path, RANK="9", MASTER_ADDR="elsewhere", OMP_NUM_THREADS="7")).restore({})
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["OMP_NUM_THREADS"]) == ("1", "127.0.0.1", "7")


def test_what_a_cell_left_is_gone(tmp_path: Path) -> None:
    around = Surroundings(spec(tmp_path))
    around.restore({})
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["RANK"] = "0"
    del os.environ["MASTER_ADDR"]
    sys.path.append("/leak")
    sys.argv[:] = ["train.py"]
    os.chdir("/")
    around.restore({})
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"]) == ("1", "127.0.0.1")
    assert (sys.path, sys.argv, os.getcwd()) == (["/notebook"], ["kernel"], str(tmp_path))


def test_a_variable_for_one_cell(tmp_path: Path) -> None:
    around = Surroundings(spec(tmp_path, MODE="a"))
    around.restore({"MODE": "b", "RANK": "chosen", "NEW": "1"})
    assert (os.environ["MODE"], os.environ["RANK"], os.environ["NEW"]) == ("b", "chosen", "1")
    around.restore({})
    assert (os.environ["MODE"], os.environ["RANK"]) == ("a", "1")
    assert "NEW" not in os.environ


def test_the_notebook_has_changed(tmp_path: Path) -> None:
    around = Surroundings(spec(tmp_path, OLD="1"))
    around.restore({})
    around.told(None)  # nothing new
    around.restore({})
    assert os.environ["OLD"] == "1"
    around.told({"environment": {"YOUNG": "2"}, "folder": "/", "path": ["/other"], "argv": ["k"]})
    around.restore({})
    assert "OLD" not in os.environ
    assert (os.environ["YOUNG"], os.getcwd(), sys.path) == ("2", "/", ["/other"])


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    around = Surroundings(spec(tmp_path / "gone"))
    told = around.restore({})
    assert told is not None
    assert str(tmp_path / "gone") in told
    # and the folder in which the rank stands may vanish too
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    around = Surroundings(spec(tmp_path))
    assert around.restore({}) is None
    assert os.getcwd() == str(tmp_path)


def test_the_cpu_is_asked_for_by_name(tmp_path: Path) -> None:
    assert rank_variables(spec(tmp_path))["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in rank_variables({**spec(tmp_path), "device": "cuda"})


def test_seeds_are_those_of_fresh_processes() -> None:
    """torch's is the same everywhere and each time, Python's and numpy's never are."""
    import numpy
    import torch

    drawn = []
    for _ in range(2):
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        environment.seed_as_a_fresh_process()
        drawn.append((torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand()))
    assert drawn[0][:2] == drawn[1][:2]
    assert drawn[0][0] == environment.DEFAULT_TORCH_SEED
    assert drawn[0][2] != drawn[1][2]
    assert drawn[0][3] != drawn[1][3]
