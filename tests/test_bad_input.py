"""Wrong arguments of every public function: what was given to what, and what it takes; never an error from inside."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import nbdist
from nbdist import Accelerator, LocalSGD, PartialState, checks, utils
from nbdist.launchers.launch import Call
from tests.training import linear_at_zero


class Thing:
    pass


WRONG: dict[str, Any] = {
    "text": "x",
    "number": 7,
    "fraction": 1.5,
    "negative": -1,
    "list": [1, "a"],
    "model": nn.Linear(1, 1),
    "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters()),
    "vector": torch.ones(2),
    "class": nn.Linear,
    "object": Thing(),
}
GRADIENT = WRONG["vector"]
GRADIENT.grad = torch.ones(2)
FLAG = ""  # nothing of these is True or False
NUMBERS = "number fraction negative"


def inside(manager: Any) -> None:
    with manager:
        pass


def one(accelerator: Accelerator) -> dict[str, tuple[Callable[..., Any], dict[str, str]]]:
    """Each function with one argument (or the few in brackets), and which of the wrong values that argument takes."""
    a, model = accelerator, linear_at_zero()
    parameters = list(model.parameters())
    return {
        "prepare": (lambda **k: a.prepare(model, **k), {"device_placement": ""}),
        "prepare_model": (a.prepare_model, {"model": "model"}),
        "prepare_model of one": (
            lambda **k: a.prepare_model(model, **k),
            {"device_placement": FLAG, "evaluation_mode": FLAG},
        ),
        "prepare_optimizer": (a.prepare_optimizer, {"optimizer": "optimizer"}),
        "prepare_scheduler": (a.prepare_scheduler, {"scheduler": ""}),
        "unwrap_model": (a.unwrap_model, {"model": "model"}),
        "unwrap_model of one": (lambda **k: a.unwrap_model(model, **k), {"keep_torch_compile": FLAG}),
        "autocast": (lambda **k: inside(a.autocast(**k)), {"autocast_handler": ""}),
        "accumulate": (lambda **k: inside(a.accumulate(model, **k)), {"last": FLAG}),
        "accumulate of one": (lambda one: inside(a.accumulate(one)), {"one": "model"}),
        "backward": (a.backward, {"loss": ""}),
        "backward of one": (
            lambda **k: a.backward(model(torch.ones(1, 1)).mean(), **k),
            {"weight": "number fraction"},
        ),
        "clip_grad_norm_": (lambda **k: a.clip_grad_norm_(max_norm=1.0, **k), {"parameters": "vector"}),
        "clip_grad_norm_ by": (
            lambda max_norm: a.clip_grad_norm_(parameters, max_norm),
            {"max_norm": NUMBERS},
        ),
        "clip_grad_value_": (lambda **k: a.clip_grad_value_(clip_value=1.0, **k), {"parameters": "vector"}),
        "clip_grad_value_ by": (lambda clip_value: a.clip_grad_value_([GRADIENT], clip_value), {"clip_value": NUMBERS}),
        "no_sync": (lambda **k: inside(a.no_sync(**k)), {"model": "model"}),
        "trigger_sync_in_backward": (lambda **k: inside(a.trigger_sync_in_backward(**k)), {"model": "model"}),
        "unscale_gradients": (a.unscale_gradients, {"optimizer": "optimizer"}),
        "steps": (lambda steps: setattr(a, "gradient_accumulation_steps", steps), {"steps": "number"}),
        "gather_for_metrics": (lambda **k: a.gather_for_metrics(parameters, **k), {"use_gather_object": FLAG}),
        "reduce": (lambda **k: a.reduce(torch.ones(1), **k), {"reduction": "", "scale": NUMBERS}),
        "pad_across_processes": (
            lambda **k: a.pad_across_processes(torch.ones(1), **k),
            {"dim": "number negative", "pad_index": NUMBERS, "pad_first": FLAG},
        ),
        "save": (lambda **k: a.save({}, **k), {"f": "text"}),
        "save as": (lambda **k: a.save({}, "x.pt", **k), {"safe_serialization": FLAG}),
        "save as safetensors": (lambda obj: a.save(obj, "x", safe_serialization=True), {"obj": ""}),
        "profile": (lambda **k: inside(a.profile(**k)), {"profile_handler": ""}),
        "verify_device_map": (a.verify_device_map, {"model": "model"}),
        "on_main_process": (a.on_main_process, {"function": "model class"}),
        "on_local_main_process": (a.on_local_main_process, {"function": "model class"}),
        "on_last_process": (a.on_last_process, {"function": "model class"}),
        "on_process": (lambda **k: a.on_process(print, **k), {"process_index": ""}),
        "on_local_process": (lambda **k: a.on_local_process(print, **k), {"local_process_index": ""}),
        "PartialState": (PartialState, {"cpu": FLAG, "backend": "text", "init_method": "text", "timeout": ""}),
        "debug": (lambda on: setattr(PartialState(), "debug", on), {"on": FLAG}),
        "destroy_process_group": (PartialState().destroy_process_group, {"group": ""}),
        "broadcast": (lambda **k: utils.broadcast(1, **k), {"from_process": ""}),
        "broadcast_object_list": (utils.broadcast_object_list, {"object_list": "list"}),
        "broadcast_object_list from": (lambda **k: utils.broadcast_object_list([1], **k), {"from_process": ""}),
        "send_to_device": (
            lambda **k: utils.send_to_device(torch.ones(1), "cpu", **k),
            {"skip_keys": "text list"},
        ),
        "set_seed": (utils.set_seed, {"seed": "number negative"}),
        "set_seed of one": (lambda **k: utils.set_seed(1, **k), {"device_specific": FLAG, "deterministic": FLAG}),
        "synchronize_rng_state": (utils.synchronize_rng_state, {"rng_type": ""}),
        "synchronize_rng_state of one": (
            lambda **k: utils.synchronize_rng_state("generator", **k),
            {"generator": ""},
        ),
        "synchronize_rng_states": (utils.synchronize_rng_states, {"rng_types": ""}),
        "get_logger": (utils.get_logger, {"name": "text"}),
        "load": (utils.load, {"f": "text"}),
        "extract_model_from_parallel": (utils.extract_model_from_parallel, {"model": "model"}),
        "find_executable_batch_size": (nbdist.find_executable_batch_size, {"function": "model class"}),
        "find_executable_batch_size of one": (
            lambda **k: nbdist.find_executable_batch_size(print, **k),
            {"starting_batch_size": "number", "reduce_batch_size_fn": "model class"},
        ),
        "LocalSGD": (lambda **k: LocalSGD(model=model, local_sgd_steps=2, **k), {"accelerator": ""}),
        "LocalSGD of one": (lambda **k: LocalSGD(a, local_sgd_steps=2, **k), {"model": "model"}),
        "LocalSGD by": (lambda **k: LocalSGD(a, model, **k), {"local_sgd_steps": "number"}),
        "LocalSGD or not": (lambda **k: LocalSGD(a, model, 2, **k), {"enabled": FLAG}),
        "Accelerator": (
            Accelerator,
            {
                "device_placement": FLAG,
                "split_batches": FLAG,
                "mixed_precision": "",
                "gradient_accumulation_steps": "number",
                "cpu": FLAG,
                "dataloader_config": "",
                "deepspeed_plugin": "",
                "fsdp_plugin": "",
                "torch_tp_plugin": "",
                "megatron_lm_plugin": "",
                "rng_types": "",
                "log_with": "",
                "project_dir": "text",
                "project_config": "",
                "gradient_accumulation_plugin": "",
                "step_scheduler_with_optimizer": FLAG,
                "kwargs_handlers": "",
                "dynamo_backend": "model class",
                "dynamo_plugin": "",
                "deepspeed_plugins": "",
                "parallelism_config": "",
                "output_dtype": "",
                "strategy": "",
            },
        ),
        "launch": (nbdist.launch, {"function": "model class"}),
        "launch of one": (
            lambda **k: nbdist.launch(print, **k),
            {"ranks": "number", "gpus": "", "output": "", "timeout": "number fraction", "env": "", "limit": "number"},
        ),
        "notebook_launcher": (
            lambda **k: nbdist.notebook_launcher(print, **k),
            {
                "args": "list",
                "num_processes": "number",
                "mixed_precision": "",
                "num_nodes": "",
                "node_rank": "",
                "max_restarts": "number",
            },
        ),
        "debug_launcher": (lambda **k: nbdist.debug_launcher(print, **k), {"num_processes": "number"}),
    }


ARGUMENTS = [(name, argument) for name, (_, takes) in one(Accelerator()).items() for argument in takes]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_was_given_and_what_is_taken_is_said(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Call, "run", lambda _: ())  # what is taken by a launcher starts nothing
    accelerator = Accelerator()
    Path("x").write_bytes(b"")
    for kind, value in WRONG.items():
        call, takes = one(accelerator)[name]
        try:
            call(**{argument: value})
        except (EOFError, AttributeError) as error:
            assert name in ("load", "launch", "notebook_launcher") and kind in takes[argument].split(), error
        except Exception as error:
            if kind == "vector" and f"shape {tuple(value.shape)}" in str(error):  # of the right kind, and too long
                continue
            assert isinstance(error, TypeError | ValueError | NotImplementedError | LookupError), (kind, error)
            assert kind not in takes[argument].split(), (kind, error)
            told = str(error)
            given = {
                type(value).__name__,
                str(value),
                *map(checks.short, [value, *(WRONG["list"] if kind == "list" else "")]),
            }
            assert any(one in told for one in given), (kind, told)
            assert "\n" not in told, (kind, told)
            innermost = traceback.extract_tb(error.__traceback__)[-1].filename
            assert Path(nbdist.__file__).parent in Path(innermost).parents, (kind, told, innermost)
        else:
            assert kind in takes[argument].split(), f"{kind} is taken"


def test_what_counts_as_a_flag_and_a_number() -> None:
    assert [checks.flag(one, "x") for one in (True, 1, numpy.bool_(True), torch.tensor(True))] == [True] * 4
    assert [checks.flag(one, "x", True) for one in (False, 0, numpy.False_, None)] == [False, False, False, True]
    assert [checks.whole(one, "x", "one") for one in (3, numpy.int64(3), torch.tensor(3))] == [3] * 3
    for value in (True, 3.0, "3", None):
        with pytest.raises(TypeError, match=r"^x is .*; it takes one$"):
            checks.whole(value, "x", "one")
    assert checks.short("a" * 200) == "a str" and checks.short(nn.Linear) == "the class Linear"
    assert Accelerator(None, None, cpu=1).device_placement


def test_ranks_and_gpus_are_called_what_they_are() -> None:
    for value, told in ((1.5, "1.5"), ("2", "'2'"), ([0], r"\[0\]"), (True, "True")):
        with pytest.raises(ValueError, match=rf"^ranks is {told}; it takes a number of ranks$"):
            nbdist.launch(print, ranks=value)
        with pytest.raises(ValueError, match=rf"^num_processes is {told}; it takes a number of ranks$"):
            nbdist.debug_launcher(print, num_processes=value)
    with pytest.raises(ValueError, match=r"^gpus is '0'; it takes a number of GPUs, or a list of which ones$"):
        nbdist.launch(print, gpus="0")
    with pytest.raises(TypeError, match=r"^launch: env\['A'\] is 1; it takes a text, as environment variables do$"):
        nbdist.launch(print, env={"A": 1})


def test_arguments_of_kwargs_handlers() -> None:
    for options, told in (
        ({"schedule_option": 3}, "ProfileKwargs.schedule_option is 3; it takes a dict or None"),
        ({"schedule_option": {"x": 1}}, "ProfileKwargs.schedule_option is {'x': 1}; it takes the arguments of torch"),
        ({"activities": "cpu"}, "ProfileKwargs.activities is 'cpu'; it takes a list or None"),
        ({"activities": [3]}, "ProfileKwargs.activities has 3; there are 'cpu'"),
        ({"on_trace_ready": 3}, "ProfileKwargs.on_trace_ready is 3; it takes a function or None"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(told)):
            inside(Accelerator().profile(nbdist.ProfileKwargs(**options)))
    PartialState(timeout=timedelta(seconds=1))


@pytest.mark.parametrize(
    "options",
    [
        nbdist.AutocastKwargs,
        nbdist.DataLoaderConfiguration,
        nbdist.DistributedDataParallelKwargs,
        nbdist.GradScalerKwargs,
        nbdist.InitProcessGroupKwargs,
        nbdist.ProfileKwargs,
        utils.GradientAccumulationPlugin,
        utils.ProjectConfiguration,
        utils.TorchDynamoPlugin,
    ],
)
def test_fields_of_options_are_what_they_are_declared_as(options: Any) -> None:
    given = {
        nbdist.DataLoaderConfiguration: "dataloader_config",
        utils.GradientAccumulationPlugin: "gradient_accumulation_plugin",
        utils.ProjectConfiguration: "project_config",
        utils.TorchDynamoPlugin: "dynamo_plugin",
    }.get(options, "kwargs_handlers")
    checks.fields(options())
    for field in dataclasses.fields(options):
        if field.type == "Any" or ("|" in str(field.type) and "str" in str(field.type).split(" | ")):
            continue
        value = options()
        setattr(value, field.name, Thing())
        with pytest.raises(TypeError, match=rf"{field.name}.* is a Thing; it "):
            Accelerator(**{given: [value] if given == "kwargs_handlers" else value})
