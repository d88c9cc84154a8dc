"""Triggers, decorators, files, logging, generators, profiles: what the Accelerator offers around the step."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nbdist
from nbdist import Accelerator, PartialState, kwargs, set_seed, state, utils
from nbdist.logging import get_logger
from tests.ranks import run_ranks
from tests.training import linear_at_zero


def _around(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    accelerator = Accelerator(project_dir=folder)
    found: dict[str, Any] = {"trigger": [accelerator.check_trigger()]}
    if rank:
        accelerator.set_trigger()
    found["trigger"] += [accelerator.check_trigger(), accelerator.check_trigger()]

    called = []
    accelerator.on_process(lambda: called.append("1"), process_index=1)()
    accelerator.on_process(process_index=0)(lambda: called.append("0"))()
    accelerator.on_local_process(local_process_index=1)(lambda: called.append("local 1"))()
    accelerator.on_main_process()(lambda: called.append("main"))()
    accelerator.on_last_process(lambda: called.append("last"))()
    found["called"] = called

    accelerator.save({"rank": torch.tensor(rank)}, os.path.join(folder, "saved"))
    accelerator.wait_for_everyone()
    found["saved"] = utils.load(os.path.join(folder, "saved"))["rank"].item(), sorted(os.listdir(folder))

    lines = io.StringIO()
    logger = get_logger("test_helpers", log_level="info")
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter("%(filename)s %(message)s"))
    logger.logger.addHandler(handler)
    logger.info("once")
    logger.info("all %d", rank, main_process_only=False)
    logger.info("in turn", in_order=True)
    logger.debug("not told")
    for _ in range(2):
        logger.warning_once("one warning", main_process_only=False)
    found["logged"] = lines.getvalue().splitlines()

    set_seed(3, device_specific=True)
    apart = torch.Generator().manual_seed(rank)
    found["drawn apart"] = torch.rand(1).item()
    utils.synchronize_rng_states(["torch", "numpy", utils.RNGType.PYTHON, "cuda", "generator"], generator=apart)
    found["drawn"] = torch.rand(1).item(), numpy.random.rand(), random.random(), torch.rand(1, generator=apart).item()

    with accelerator.profile(kwargs.ProfileKwargs(activities=["cpu"], output_trace_dir=folder)) as profiler:
        torch.ones(2).sum()
    found["profiled"] = any("sum" in event.key for event in profiler.key_averages())
    found["traces"] = [bool(json.loads(Path(folder, f"profile_{one}.json").read_text())) for one in range(ranks)]

    PartialState().debug = True
    try:
        accelerator.gather({"a": torch.ones(rank + 1), "b": torch.ones(1, rank + 1)})
    except utils.DistributedOperationException as error:
        found["debug"] = str(error)
    return found


@pytest.mark.ranks
def test_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_around, 2, str(tmp_path))
    assert first["trigger"] == second["trigger"] == [False, True, False]
    assert first["called"] == ["0", "main"] and second["called"] == ["1", "local 1", "last"]
    assert first["saved"] == second["saved"] == (0, ["saved"])
    name = Path(__file__).name
    assert first["logged"] == [f"{name} {text}" for text in ("once", "all 0", "in turn", "one warning")]
    assert second["logged"] == [f"{name} {text}" for text in ("all 1", "in turn", "one warning")]
    assert first["drawn apart"] != second["drawn apart"] and first["drawn"] == second["drawn"]
    assert first["profiled"] and first["traces"] == second["traces"] == [True, True]
    for rank in range(2):
        told = f"rank {rank} brings value: a dict with keys ['a', 'b']; value['a']: a 1-dim tensor of float32 on cpu, "
        assert told + f"shape ({rank + 1},)" in first["debug"] and f"shape (1, {rank + 1})" in second["debug"]


def test_decorators_name_a_process_that_exists() -> None:
    me = PartialState()
    with pytest.raises(TypeError, match="process_index="):
        me.on_process(lambda: None)
    with pytest.raises(ValueError, match="local_process_index is 1; there are processes 0 to 0"):
        me.on_local_process(local_process_index=1)

    @me.on_process(process_index=0)
    def named(value: int, more: int = 1) -> int:
        """Its own words."""
        return value + more

    assert named(1, more=2) == 3 and named.__name__ == "named" and named.__doc__ == "Its own words."


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    accelerator, place = Accelerator(), tmp_path / "model.pt"
    accelerator.save({"a": torch.ones(2)}, place)
    place.chmod(0o640)
    link = tmp_path / "link.pt"
    link.symlink_to(place)
    accelerator.save({"a": torch.zeros(2)}, link)
    assert link.is_symlink() and stat.S_IMODE(place.stat().st_mode) == 0o640
    assert utils.load(place)["a"].tolist() == [0.0, 0.0]
    with pytest.raises(Exception, match="pickle"):
        accelerator.save({"a": (one for one in ())}, place)
    assert utils.load(place)["a"].tolist() == [0.0, 0.0]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.pt", "model.pt"]
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*/nowhere/x'$"):
        accelerator.save({}, tmp_path / "nowhere" / "x")
    memory = io.BytesIO()
    utils.save([1, 2], memory)
    assert utils.load(io.BytesIO(memory.getvalue())) == [1, 2]


def test_safetensors(tmp_path: Path) -> None:
    weight, place = torch.arange(6.0).reshape(2, 3), tmp_path / "x.safetensors"
    Accelerator().save({"tied": weight, "also": weight, "view": weight.T}, place, safe_serialization=True)
    loaded = utils.load(place)
    assert loaded["also"].tolist() == loaded["tied"].tolist() and loaded["view"].tolist() == weight.T.tolist()
    with pytest.raises(TypeError, match="these are none: epoch"):
        Accelerator().save({"epoch": 1}, place, safe_serialization=True)


def test_project_folders(tmp_path: Path) -> None:
    assert Accelerator().project_dir is None and Accelerator().logging_dir is None
    one = Accelerator(project_dir=tmp_path)
    assert one.project_dir == one.logging_dir == str(tmp_path)
    two = Accelerator(project_dir="here", project_config=utils.ProjectConfiguration(logging_dir="logs", iteration=3))
    assert (two.project_dir, two.logging_dir, two.save_iteration) == ("here", "logs", 3)


def test_memory_is_given_back() -> None:
    accelerator = Accelerator()
    model, optimizer = nn.Linear(1, 1), None
    gone = weakref.ref(model)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, 1)).mean())
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None and optimizer is None and gone() is None
    accelerator.gradient_accumulation_steps = 2
    kept = accelerator.prepare(linear_at_zero())
    with accelerator.accumulate(kept):
        accelerator.backward(kept(torch.ones(1, 1)).mean())
    assert not accelerator.sync_gradients
    accelerator.free_memory()
    assert accelerator.sync_gradients and kept.weight.grad is None  # an open window goes too
    assert accelerator.clear() == []
    accelerator.end_training()


def test_without_effect_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    state._noted.clear()
    for _ in range(2):
        accelerator = Accelerator(rng_types=["torch", "generator"])
        with accelerator.join_uneven_inputs([linear_at_zero()], even_batches=False):
            pass
    told = [str(one.message) for one in recwarn if "rng_types" in str(one.message) or "join_uneven" in str(one.message)]
    assert len(told) == 2 and all(one.filename == __file__ for one in recwarn if str(one.message) in told)
    with pytest.raises(ValueError, match="rng_type is 'dice'; there are 'torch', 'cuda'"):
        Accelerator(rng_types=["dice"])


def test_every_handler_is_taken() -> None:
    from datetime import timedelta

    state._noted.clear()
    Accelerator(
        kwargs_handlers=[
            kwargs.AutocastKwargs(),
            kwargs.GradScalerKwargs(),
            kwargs.InitProcessGroupKwargs(timeout=timedelta(seconds=5)),  # there is no group: nothing to say
            kwargs.ProfileKwargs(),
            kwargs.DistributedDataParallelKwargs(),
        ]
    )
    with (
        pytest.raises(ValueError, match="'coffee'; there are 'cpu'"),
        Accelerator().profile(kwargs.ProfileKwargs(activities=["coffee"])),
    ):
        pass


def test_device_maps_are_seen() -> None:
    model = nn.Sequential(linear_at_zero())
    assert not Accelerator().verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": 1}
    assert Accelerator().verify_device_map(model)


def test_seeds_of_any_size() -> None:
    for seed in (2**32, 2**64 + 5, -3, 10**30):
        set_seed(seed)
        first = torch.rand(1).item(), numpy.random.rand(), random.random()
        set_seed(seed)
        assert (torch.rand(1).item(), numpy.random.rand(), random.random()) == first
    set_seed(0, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def _unwrapped(rank: int, ranks: int) -> list[bool]:
    own = linear_at_zero()
    wrapped, compiled = DistributedDataParallel(own), torch.compile(own, backend="eager")
    holder = nn.Sequential(wrapped)
    extract = utils.extract_model_from_parallel
    return [
        extract(own) is own,
        extract(wrapped) is own,
        extract(torch.compile(wrapped, backend="eager")) is own,
        extract(compiled) is compiled,
        extract(compiled, keep_torch_compile=False) is own,
        extract(DistributedDataParallel(compiled), keep_torch_compile=False) is own,
        extract(holder)[0] is wrapped,
        extract(holder, recursive=True)[0] is own,
    ]


@pytest.mark.ranks
def test_the_bare_model_without_an_accelerator() -> None:
    assert run_ranks(_unwrapped, 1) == [[True] * 8]


def test_the_faces_offer_what_exists() -> None:
    for face in (nbdist, utils):
        assert all(getattr(face, name) is not None for name in face.__all__)
        assert set(face.__all__) <= set(dir(face))
    with pytest.raises(AttributeError, match="no attribute 'gahter'; it has: AutocastKwargs"):
        utils.gahter  # noqa: B018
