"""`notebook_launcher` and `debug_launcher`: Accelerate's signatures, without its limits. See also test_contract.py."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch

import nbdist
from nbdist import debug_launcher, notebook_launcher
from nbdist.launchers import notebook

# As `inspect.signature` shows them for Accelerate 1.15.
ACCELERATE_NOTEBOOK = (
    "(function, args=(), num_processes=None, mixed_precision='no', use_port='29500', master_addr='127.0.0.1', "
    "node_rank=0, num_nodes=1, rdzv_backend='static', rdzv_endpoint='', rdzv_conf=None, rdzv_id='none', "
    "max_restarts=0, monitor_interval=0.1, log_line_prefix_template=None)"
)
ACCELERATE_DEBUG = "(function, args=(), num_processes=2)"


def without_types(function: Any) -> str:
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_signatures_are_accelerates() -> None:
    assert without_types(notebook_launcher) == ACCELERATE_NOTEBOOK
    assert without_types(debug_launcher) == ACCELERATE_DEBUG


def told(by: int = 1) -> tuple[int, str | None]:
    import torch.distributed as dist

    return dist.get_rank() * by, os.environ.get("ACCELERATE_MIXED_PRECISION")


def nothing() -> None:
    pass


@pytest.mark.ranks
def test_values_when_there_are_any_else_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook_launcher(told, (3,), num_processes=2) == [(0, "no"), (3, "no")]
    assert notebook_launcher(nothing, num_processes=2) is None
    assert (
        capsys.readouterr().out == 2 * "Launching training on 2 CPU ranks (num_processes=2; this machine has no GPU).\n"
    )
    assert debug_launcher(told) == [(0, "no"), (1, "no")] and debug_launcher(nothing) is None
    assert capsys.readouterr().out == ""


@pytest.mark.ranks
def test_the_number_is_chosen_and_the_reason_said(capsys: pytest.CaptureFixture[str]) -> None:
    values = notebook_launcher(told, mixed_precision="BF16")
    assert values is not None and list(values) == [(rank, "bf16") for rank in range(len(values))]
    out = capsys.readouterr().out
    assert (
        out.startswith(f"Launching training on {len(values)} CPU ranks (this machine has no GPU; ")
        and "physical core" in out
    )


@pytest.mark.ranks
def test_one_process_is_one_rank_of_its_own() -> None:
    values = notebook_launcher(lambda: (os.getpid(), os.environ["WORLD_SIZE"]), num_processes=1)
    assert values is not None and values[0][0] != os.getpid() and values[0][1] == "1"


@pytest.mark.ranks
def test_what_there_is_nothing_to_configure_for_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook, "_said", set())
    for _ in range(2):
        notebook_launcher(nothing, num_processes=1, use_port=29501, monitor_interval=1.0, master_addr="127.0.0.1")
    err = capsys.readouterr().err
    assert err.count("use_port, monitor_interval: accepted, and not needed") == 1 and "master_addr" not in err


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_nodes": 2}, NotImplementedError, "torchrun --nnodes N"),
        ({"node_rank": 1}, NotImplementedError, "this machine only"),
        ({"mixed_precision": "bf17"}, ValueError, r"mixed_precision='bf17': takes one of no, fp16, bf16, fp8"),
        ({"mixed_precision": None}, ValueError, "takes one of no"),
        ({"num_processes": 0}, ValueError, "^num_processes=0: .*1 or more"),
        ({"max_restarts": -1}, ValueError, "max_restarts is -1; it takes a number, 0 or more"),
        ({"args": 3}, TypeError, r"args=3: takes a tuple .* args=\(x,\)"),
        ({"args": {"a": 1}}, TypeError, "takes a tuple"),
        ({"args": "abc"}, TypeError, "takes a tuple"),
        ({"function": "train"}, TypeError, r"notebook_launcher\('train'\): takes a function"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        notebook_launcher(**{"function": nothing, **arguments})


def test_debug_launcher_refuses_by_the_same_names() -> None:
    with pytest.raises(ValueError, match=r"^num_processes=0: .*1 or more"):
        debug_launcher(nothing, num_processes=0)
    with pytest.raises(TypeError, match="takes a tuple"):
        debug_launcher(nothing, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["PJRT_DEVICE", "TPU_NAME"])
def test_a_tpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "TPU")
    with pytest.raises(NotImplementedError, match="offers a TPU"):
        notebook_launcher(nothing)


def flaky(state: dict[str, int], failures: int) -> tuple[int, str]:
    import torch.distributed as dist

    state["n"] += 1
    if dist.get_rank() == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failures:
        raise OSError("the network went")
    dist.barrier()
    return state["n"], os.environ["TORCHELASTIC_MAX_RESTARTS"]


@pytest.mark.ranks
def test_restarts_begin_from_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"n": 0}
    assert notebook_launcher(flaky, (state, 2), 2, max_restarts=2) == [(1, "2"), (1, "2")]
    assert state == {"n": 1}
    err = capsys.readouterr().err
    assert "restart 1 of 2, from what the notebook holds, after OSError: the network went (rank 1 failed first" in err
    assert "restart 2 of 2" in err


@pytest.mark.ranks
def test_the_last_attempts_exception_is_raised_and_what_it_made_is_here() -> None:
    state = {"n": 0}
    with pytest.raises(OSError, match="the network went"):
        notebook_launcher(flaky, (state, 5), 2, max_restarts=1)
    assert state == {"n": 1}


@pytest.mark.ranks
def test_what_cannot_be_sent_is_not_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    with pytest.raises(TypeError, match="lock"):
        notebook_launcher(print, (threading.Lock(),), 2, max_restarts=3)
    assert "restart" not in capsys.readouterr().err


@pytest.mark.ranks
def test_a_value_that_cannot_come_back_is_named_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    assert notebook_launcher(threading.Lock, num_processes=2) is None
    assert "returned on rank 1 cannot come back: a lock" in capsys.readouterr().err


@pytest.mark.ranks
def test_our_accelerator_computes_in_the_precision_asked_for() -> None:
    def dtype() -> str:
        model = nbdist.Accelerator(output_dtype="keep").prepare(torch.nn.Linear(1, 1))
        return str(model(torch.ones(1, 1)).dtype)

    assert debug_launcher(dtype) == ["torch.float32"] * 2
    assert notebook_launcher(dtype, num_processes=1, mixed_precision="bf16") == ["torch.bfloat16"]
