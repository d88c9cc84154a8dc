"""One self-test for each row of nbdist/private.py: it raises where the interface is not as we use it.

Nothing here is imported before it is run; none of them needs a process group.
"""

from __future__ import annotations

import importlib
from typing import Any


def backend_in_place() -> None:
    from nbdist.worker import groups

    assert groups.Groups.self_test(None)  # type: ignore[arg-type]  # it reads nothing of the instance


def backends_taken_out() -> None:
    from nbdist.worker import backends

    assert backends.works()


def flight_recorder() -> None:
    import pickle

    c10d = importlib.import_module("torch._C._distributed_c10d")
    told = pickle.loads(c10d._dump_fr_trace(True, False, False))
    assert isinstance(told, dict) and "version" in told


def flattened_parameters() -> None:
    utils = importlib.import_module("torch.distributed.fsdp._common_utils")
    assert utils.FSDP_FLATTENED == "_fsdp_flattened"


def new_group_helper() -> None:
    from torch.distributed import distributed_c10d as registry

    for user in (registry.init_process_group, registry._new_group_with_tag):
        assert "_new_process_group_helper" in user.__code__.co_names or "_new_process_group_helper" in _names_below(
            user
        )


def _names_below(function: Any) -> set[str]:
    """Names that a decorated function's real code uses."""
    import inspect

    return set(inspect.unwrap(function).__code__.co_names)


def table_of_groups() -> None:
    from torch.distributed import distributed_c10d as registry

    world = registry._world
    assert all(isinstance(getattr(world, name), dict) for name in ("pg_map", "pg_names", "pg_group_ranks"))
    assert isinstance(world.group_count, int)
    world.group_count = world.group_count  # it can be set


def default_group() -> None:
    from torch.distributed import distributed_c10d as registry

    before = registry.GroupMember.WORLD
    registry._update_default_pg(None)
    assert registry.GroupMember.WORLD is None
    registry._update_default_pg(before)
    assert registry.GroupMember.WORLD is before


def arming() -> None:
    from nbdist.strategies import ddp, repair

    assert repair.can(ddp._ARMING)


def hooks_of_a_parameter() -> None:
    import torch

    one, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    called: list[Any] = []
    handle = one.register_post_accumulate_grad_hook(called.append)
    other._post_accumulate_grad_hooks = one._post_accumulate_grad_hooks
    other.sum().backward()
    assert len(called) == 1 and called[0] is other
    handle.remove()
    other.sum().backward()
    assert len(called) == 1


def other_resets() -> None:
    import torch

    one = torch.nn.MultiheadAttention(2, 1)
    with torch.no_grad():
        one.in_proj_weight.fill_(9)
    one._reset_parameters()
    assert not (one.in_proj_weight == 9).any()


def run_of_the_engine() -> None:
    import torch

    from nbdist import engine

    assert engine._run is not None
    weight = torch.ones(2, requires_grad=True)
    engine.backward(weight.sum(), torch.tensor(3.0))
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]


def orthogonalizing() -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    powerSGD_hook._orthogonalize(torch.ones(1, 2, 1))  # a stack of one; of one without a stack nothing is said


def overflows() -> None:
    import torch

    scaler, weight = torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    assert [one.item() for one in scaler._found_inf_per_device(optimizer).values()] == [1.0]


def way_of_forward() -> None:
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    from nbdist.strategies import replica

    assert replica._can_go()
    source = inspect.getsource(DistributedDataParallel.forward)
    assert "self._pre_forward(" in source and "self._post_forward(output)" in source
    for half, asked in (
        ("_pre_forward", "_check_sync_bufs_pre_fwd()"),
        ("_post_forward", "_check_sync_bufs_post_fwd()"),
    ):
        assert f"if self.{asked}:" in inspect.getsource(getattr(DistributedDataParallel, half))


def repairing() -> None:
    from torch.distributed import Logger, Reducer

    from nbdist.strategies import repair

    assert repair.can_repair()
    assert all(hasattr(Reducer, name) for name in ("_set_static_graph", "_set_mixed_precision_param_dtype"))
    assert hasattr(Logger, "_set_static_graph")


def sync_states() -> None:
    import inspect

    from torch.distributed.utils import _sync_module_states

    wanted = {"module", "process_group", "broadcast_bucket_size", "src", "params_and_buffers_to_ignore"}
    assert wanted <= set(inspect.signature(_sync_module_states).parameters)


def left_out() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert model._ddp_params_and_buffers_to_ignore == ["bias"]


def state_versions() -> None:
    from torch import nn

    state = nn.Sequential(nn.BatchNorm1d(1)).state_dict()
    assert state._metadata.keys() == {"", "0"} and state._metadata["0"]["version"] == 2


def foreach() -> None:
    import torch

    value = torch.ones(2)
    torch._foreach_mul_([value], 3.0)
    assert value.tolist() == [3.0, 3.0]


def pin() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    assert pin_memory("text") == "text"


def module_parts() -> None:
    import torch

    from nbdist.shipping.kinds_object import MODULE_PARTS

    assert set(MODULE_PARTS) <= set(vars(torch.nn.Module()))


def module_class_of_its_own() -> None:
    import torch
    from torch.nn.utils import parametrize

    from nbdist.shipping.kinds_object import parametrized

    module = torch.nn.Linear(1, 1)
    parametrize.register_parametrization(module, "weight", torch.nn.Identity())
    assert parametrized(type(module)) and not parametrized(torch.nn.Linear)


def handles_of_hooks() -> None:
    import torch
    from torch.utils.hooks import RemovableHandle

    from nbdist.shipping.kinds_special import refers_weakly

    module = torch.nn.Linear(1, 1)
    handle = module.register_forward_hook(print, with_kwargs=True)
    state: Any = handle.__getstate__()
    assert refers_weakly(RemovableHandle)
    assert state[0] is module._forward_hooks and state[1] == handle.id < RemovableHandle.next_id
    assert state[2][0] is module._forward_hooks_with_kwargs
    again = object.__new__(RemovableHandle)
    again.__setstate__(state)
    again.remove()
    assert not module._forward_hooks and not module._forward_hooks_with_kwargs


def mapping_of_an_array() -> None:
    import tempfile

    import numpy

    with tempfile.TemporaryFile() as file:
        assert "_mmap" in vars(numpy.memmap(file, dtype="u1", mode="w+", shape=(1,)))


def loader_attributes() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    assert DataLoader([1])._iterator is None

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    assert vars(DataLoader(Stream()))["_IterableDataset_len_called"] is None


def state_of_random() -> None:
    from nbdist.data import sandbox

    assert sandbox._in_memory()


def pipeline_of_datasets() -> None:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:  # it need not be there
        return
    from nbdist.data.stream_state import is_exact

    stream = datasets.Dataset.from_dict({"id": [1, 2]}).to_iterable_dataset()
    assert is_exact(stream._ex_iterable)
    assert not is_exact(stream.shuffle(seed=1, buffer_size=2).map(len)._ex_iterable)


def compiled() -> None:
    import torch
    from torch._dynamo.eval_frame import OptimizedModule

    module = torch.nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, OptimizedModule) and compiled._orig_mod is module
    assert "_compiled_call_impl" in vars(torch.nn.Module) or hasattr(module, "_compiled_call_impl")


def checkpoint_wrapper() -> None:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    names = [name for name, _ in torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(1, 1))).named_parameters()]
    assert names == ["0._checkpoint_wrapped_module.weight", "0._checkpoint_wrapped_module.bias"], names


def classes_that_stay() -> None:
    from nbdist.shipping import exporters

    for path in exporters.by_path():
        module, _, name = path.rpartition(".")
        if module.startswith("torch"):
            assert isinstance(getattr(importlib.import_module(module), name), type), path


def marks_of_sharding() -> None:
    contract = importlib.import_module("torch.distributed._composable.contract")
    assert str(contract.STATE_KEY).startswith("__composable_api_")


def counting_gpus() -> None:
    import torch

    for count in (torch.cuda._device_count_nvml, torch.cuda._device_count_amdsmi):
        assert isinstance(count(), int)


def python_unpickler() -> None:
    import io
    import pickle

    unpickler: Any = pickle._Unpickler(io.BytesIO(pickle.dumps([1])))
    assert unpickler.load() == [1] and isinstance(unpickler.memo, dict)


def memo_of_the_pickler() -> None:
    import io
    import pickle

    value = [1]
    pickler = pickle.Pickler(io.BytesIO(), protocol=5)
    pickler.dump(value)
    assert pickler.memo.copy()[id(value)] == (0, value)
    unpickler = pickle.Unpickler(io.BytesIO(pickle.dumps(value)))
    again = unpickler.load()
    assert unpickler.memo.copy()[0] is again


def layout_of_lists() -> None:
    from nbdist.shipping import plain

    assert plain._addresses_can_be_compared()


def count_without_cuda() -> None:
    import torch

    assert callable(torch.cuda._device_count_nvml) and callable(torch.cuda._device_count_amdsmi)


def children_of_multiprocessing() -> None:
    from multiprocessing import forkserver, resource_tracker

    assert hasattr(forkserver._forkserver, "_forkserver_pid")
    assert hasattr(resource_tracker._resource_tracker, "_pid")


def class_of_cloudpickle() -> None:
    import cloudpickle

    class Slotted:
        __slots__ = ("_private",)

    Slotted.__module__ = "__main__"
    again = cloudpickle.loads(_packed(Slotted))
    assert again.__slots__ == ("_private",)


def _packed(value: Any) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)


def shell() -> None:
    shell = importlib.import_module("IPython.core.interactiveshell").InteractiveShell
    wanted = ("init_sys_modules", "init_user_ns", "init_history", "init_display_formatter", "enable_gui", "system")
    assert all(hasattr(shell, name) for name in wanted)
    assert shell.display_pub_class is not None


def late_output() -> None:
    assert hasattr(importlib.import_module("ipykernel.ipkernel").IPythonKernel, "iopub_socket")
    assert hasattr(importlib.import_module("ipykernel.zmqshell").ZMQInteractiveShell, "get_parent")


def print_options() -> None:
    torch = importlib.import_module("torch")
    assert {"precision", "threshold", "edgeitems", "linewidth", "sci_mode"} <= vars(torch._tensor_str.PRINT_OPTS).keys()
