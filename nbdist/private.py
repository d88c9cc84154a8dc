"""Every private interface that nbdist stands on: what for, what happens without it, and a self-test for each.

    python -m nbdist.private        tries all of them on this installation

torch promises nothing about these names, so each use is guarded: where one is gone, the fallback runs.
tests/test_private.py reads the sources and fails on a private name that no row lists, and on a row that no source
needs; it runs every self-test; and for each fallback it names the test that takes the interface away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from nbdist import self_tests, self_tests_sharded

# What the self-tests were run on. With the first of each kind every test was run, with the others the self-tests alone.
RUN_ON = {
    "torch": ("2.13.0", "2.9.0"),
    "Python": ("3.11",),
    "cloudpickle": ("3.1.3",),
    "IPython": ("9.18.1",),
    "ipykernel": ("7.4.0",),
}


@dataclass(frozen=True)
class Interface:
    """One private interface.

    Attributes:
        of: whose it is.
        names: its names as they stand in the sources, with spaces between; of an interface that has no private
            name, ours for it.
        used_in: the files that use it, with spaces between.
        what_for: what it does for the user.
        fallback: what happens without it.
        self_test: raises when the interface is not as we use it.
        taken_away: the test of the fallback; "" where the names are only looked for, and absent ones change nothing.
    """

    of: str
    names: str
    used_in: str
    what_for: str
    fallback: str
    self_test: Callable[[], None]
    taken_away: str


INTERFACES: tuple[Interface, ...] = (
    Interface(
        "torch",
        "_C _distributed_c10d _register_backend _get_backend _set_sequence_number_for_group _Options _timeout _devices",
        "nbdist/worker/groups.py nbdist/worker/backends.py nbdist/worker/where.py nbdist/shipping/exporters.py",
        "process groups are healed in place after a Stop: a new gloo backend inside the same ProcessGroup",
        "the groups are made again, and the notebook is told that what holds them (DDP, meshes) must be too",
        self_tests.backend_in_place,
        "tests/kernel/test_healing.py::test_where_healing_in_place_does_not_work",
    ),
    Interface(
        "torch",
        "_ZTVN4c10d12ProcessGroupE _ZN4c10d12ProcessGroup17release_resourcesEv",
        "nbdist/worker/backends.py",
        "backends that were replaced end, so that healing leaves no thread and no descriptor",
        "they stay, and after 20 healings the notebook suggests --fresh",
        self_tests.backends_taken_out,
        "tests/kernel/test_healing.py::test_many_heals_with_a_torch_whose_backends_stay",
    ),
    Interface(
        "torch",
        "_dump_fr_trace",
        "nbdist/worker/where.py",
        "torch's flight recorder: which collective a rank waits in, and whether all are in step",
        "the function at the top of the stack is told instead; every Stop heals, needed or not",
        self_tests.flight_recorder,
        "tests/kernel/test_private_gone.py::test_without_the_flight_recorder",
    ),
    Interface(
        "torch",
        "_new_process_group_helper",
        "nbdist/worker/groups.py",
        "the sockets of every new group are noted, to be cut when a rank must get out of a collective",
        "init_process_group and new_group are watched; a DeviceMesh's own groups are not cut",
        self_tests.new_group_helper,
        "tests/kernel/test_private_gone.py::test_without_the_function_below_all_groups",
    ),
    Interface(
        "torch",
        "_world",
        "nbdist/worker/groups.py",
        "torch's table of groups: their names and members, so that all ranks heal the same ones in the same order",
        "no group is known: they are made again",
        self_tests.table_of_groups,
        "tests/kernel/test_private_gone.py::test_without_the_table_of_groups",
    ),
    Interface(
        "torch",
        "_update_default_pg",
        "nbdist/worker/guests/torch_distributed.py",
        "destroy_process_group in a cell closes the pool's group, and the next cell has it open again",
        "GroupMember.WORLD is set, which is the same but for a prefix in torch's log",
        self_tests.default_group,
        "tests/kernel/test_private_gone.py::test_without_the_setter_of_the_default_group",
    ),
    Interface(
        "torch",
        "_post_accumulate_grad_hooks",
        "nbdist/strategies/carrying.py",
        "register_post_accumulate_grad_hook of a parameter that is replaced goes along, and its handle still works",
        "the hook stays on the old parameter",
        self_tests.hooks_of_a_parameter,
        "",
    ),
    Interface(
        "torch",
        "_reset_parameters _init_weights",
        "nbdist/strategies/meta.py",
        "values of a model on the meta device: so torch's attention names reset_parameters, and other models what they "
        "do with each module",
        "what has reset_parameters alone is given values; the rest is an error that names it",
        self_tests.other_resets,
        "",
    ),
    Interface(
        "torch",
        "_rebuild_buckets _check_reducer_finalized",
        "nbdist/strategies/ddp.py",
        "DDP's reducer is armed at each backward: several backward calls after one forward are averaged",
        "torch's own behaviour: averaged once, after a forward through the wrapper",
        self_tests.arming,
        "tests/kernel/test_private_gone.py::test_without_arming_the_reducer",
    ),
    Interface(
        "torch",
        "_engine_run_backward",
        "nbdist/engine.py",
        "backward of one loss begins 7 us sooner",
        "torch.autograd.backward",
        self_tests.run_of_the_engine,
        "tests/test_accelerator.py::test_without_the_run_of_the_engine",
    ),
    Interface(
        "torch",
        "_orthogonalize",
        "nbdist/strategies/compression.py",
        "a communication hook that cannot work in this torch is refused before it is used",
        "it fails in the first iteration that it compresses",
        self_tests.orthogonalizing,
        "",
    ),
    Interface(
        "torch",
        "_found_inf_per_device",
        "nbdist/scaling.py",
        "whether gradients of fp16 have overflowed is asked of the scaler, which knows it",
        "the gradients are looked at once more",
        self_tests.overflows,
        "tests/test_scaling.py::test_without_the_scalers_own_word_the_gradients_are_looked_at",
    ),
    Interface(
        "torch",
        "_check_sync_bufs_pre_fwd _check_sync_bufs_post_fwd",
        "nbdist/strategies/replica.py",
        "methods of a module other than forward go the way of DDP's forward; buffers are made equal behind it, and "
        "never in evaluation",
        "they are called as they are: gradients are averaged, buffers are not made equal; forward does it before",
        self_tests.way_of_forward,
        "tests/kernel/test_private_gone.py::test_without_the_halves_of_ddps_forward",
    ),
    Interface(
        "torch",
        "_get_fsdp_state _fsdp_param_groups _fsdp_param_group _unsharded_param _partial_reduce_output _is_hsdp "
        "_lazy_init _pre_forward _post_forward",
        "nbdist/strategies/sharded.py nbdist/strategies/fsdp_repair.py nbdist/strategies/replica.py nbdist/views.py",
        "gradients of unfinished windows of a sharded module are found, set aside and dropped; its methods other than "
        "forward gather what they compute with (and those of DDP go the way of its forward)",
        "gradients of a window that was left stay; hybrid sharding shares them at each micro-batch; methods compute "
        "with what the units in them gather",
        self_tests_sharded.insides_of_sharded_modules,
        "tests/strategies/test_fsdp.py::test_without_the_insides_of_torch_it_trains_all_the_same",
    ),
    Interface(
        "torch",
        "_attention",
        "nbdist/context.py",
        "how ranks get the keys and values of others under context parallel is the user's choice",
        "torch's own default, which adds the same in another order",
        self_tests_sharded.choosing_the_exchange_of_keys,
        "",
    ),
    Interface(
        "torch",
        "_training_state _state_ctx _comm_ctx _sharded_state _all_gather_result _post_reduce_event "
        "_reshard_after_forward_event _all_reduce_state _post_forward_indices _modules_to_run_forward "
        "_composable_state _module_state_mapping _fsdp_state",
        "nbdist/strategies/fsdp_repair.py nbdist/strategies/sharded.py",
        "a sharded module whose forward or backward was interrupted trains on",
        "it is said that the model must be made again",
        self_tests_sharded.repairing_of_sharded_modules,
        "tests/strategies/test_fsdp.py::test_without_repairing_it_says_so",
    ),
    Interface(
        "torch",
        "_get_ddp_logging_data _remove_autograd_hooks _build_params_for_reducer _ddp_init_helper "
        "_build_debug_param_to_name_mapping _has_rebuilt_buckets _static_graph_delay_allreduce_enqueued "
        "_set_static_graph _set_mixed_precision_param_dtype _fp_param _comm_hooks _register_comm_hook "
        "_register_builtin_comm_hook",
        "nbdist/strategies/repair.py nbdist/strategies/ddp.py",
        "a DDP wrapper whose forward or backward was interrupted gets a new reducer, and trains on",
        "it is said that the wrapper must be made again",
        self_tests.repairing,
        "tests/kernel/test_private_gone.py::test_without_repairing_ddp",
    ),
    Interface(
        "torch",
        "_sync_module_states",
        "nbdist/strategies/ddp.py",
        "a module that is prepared again is made equal to rank 0's, in few messages",
        "a broadcast for each parameter and buffer",
        self_tests.sync_states,
        "tests/kernel/test_private_gone.py::test_without_the_bucketed_broadcast",
    ),
    Interface(
        "torch",
        "_ddp_params_and_buffers_to_ignore",
        "nbdist/strategies/likeness.py",
        "what DDP is told to leave out may differ between the ranks",
        "it must be alike too",
        self_tests.left_out,
        "",
    ),
    Interface(
        "torch",
        "_metadata",
        "nbdist/strategies/naming.py",
        "versions of modules inside of a state dict, under the names with and without DDP's prefix",
        "modules load as of their first version, as from a plain dict",
        self_tests.state_versions,
        "",
    ),
    Interface(
        "torch",
        "_foreach_mul_",
        "nbdist/strategies/base.py nbdist/strategies/norms.py",
        "gradients are scaled in one call",
        "one call for each",
        self_tests.foreach,
        "tests/kernel/test_private_gone.py::test_without_foreach",
    ),
    Interface(
        "torch",
        "_utils",
        "nbdist/data/stream.py",
        "the pinned memory of the last, split batch",
        "that one batch is not pinned",
        self_tests.pin,
        "tests/kernel/test_private_gone.py::test_without_pin_memory",
    ),
    Interface(
        "datasets",
        "_ex_iterable",
        "nbdist/data/stream_state.py nbdist/data/own_order.py",
        "whether a stream holds samples back (a shuffle buffer); if not, it resumes by its own state",
        "it is read up to where it was",
        self_tests.pipeline_of_datasets,
        "tests/data/test_datasets.py::test_without_the_pipeline_of_a_stream_it_is_read",
    ),
    Interface(
        "torch",
        "_parameters _buffers _modules _non_persistent_buffers_set _backward_pre_hooks _backward_hooks "
        "_forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks "
        "_forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks "
        "_load_state_dict_post_hooks",
        "nbdist/shipping/kinds_object.py nbdist/shipping/pickler.py nbdist/shipping/reaching.py "
        "nbdist/shipping/writing.py nbdist/worker/holdings.py nbdist/strategies/carrying.py",
        "the empty tables of an nn.Module cost nothing in a message",
        "a table with another name travels as any attribute does",
        self_tests.module_parts,
        "",
    ),
    Interface(
        "torch",
        "parametrized",
        "nbdist/shipping/kinds_object.py nbdist/shipping/classify.py",
        "a module with parametrizations travels, though the class that torch makes for it forbids to pickle it",
        "it is named as what cannot be sent, or stays on the ranks as a handle",
        self_tests.module_class_of_its_own,
        "tests/kernel/test_private_gone.py::test_without_the_class_of_parametrized_modules",
    ),
    Interface(
        "torch",
        "RemovableHandle next_id __getstate__",
        "nbdist/shipping/kinds_special.py nbdist/shipping/hooks.py",
        "the handle of a hook removes it on both sides, and no id of a hook is given out on both",
        "handles stay on the side that made them; ids are as each process gives them",
        self_tests.handles_of_hooks,
        "tests/kernel/test_private_gone.py::test_without_the_state_of_handles_of_hooks",
    ),
    Interface(
        "torch",
        "_fsdp_flattened",
        "nbdist/loose.py",
        "parameters that the user's own FullyShardedDataParallel spreads over the ranks are not averaged as if loose",
        "parts of one size are averaged: prepare no optimizer of a model that is wrapped by hand",
        self_tests.flattened_parameters,
        "",
    ),
    Interface(
        "numpy",
        "_mmap",
        "nbdist/shipping/kinds_array.py",
        "a memory-mapped array travels with its content; each side keeps its own mapping",
        "a name that is not there is passed over",
        self_tests.mapping_of_an_array,
        "",
    ),
    Interface(
        "Python",
        "__basicsize__",
        "nbdist/data/sandbox.py",
        "the state of random's generator is exchanged as memory when a random stream is read: 1 us a step, and not 23",
        "it is copied by getstate and setstate",
        self_tests.state_of_random,
        "tests/data/test_sandbox.py::test_where_states_cannot_be_exchanged_as_memory",
    ),
    Interface(
        "torch",
        "_iterator _IterableDataset_len_called",
        "nbdist/data/loader.py nbdist/data/inside.py",
        "attributes of a DataLoader that belong to one process and are not taken into the prepared one",
        "names that are not there are passed over",
        self_tests.loader_attributes,
        "",
    ),
    Interface(
        "torch",
        "_dynamo _orig_mod _compiled_call_impl",
        "nbdist/shipping/exporters.py nbdist/shipping/kinds_object.py nbdist/strategies/ddp.py "
        "nbdist/strategies/replica.py nbdist/strategies/unwrapping.py nbdist/compiling.py nbdist/keeping.py "
        "nbdist/strategies/fsdp.py nbdist/strategies/sharded.py nbdist/checkpoint/naming.py "
        "nbdist/strategies/tensor.py magics/session.py",
        "a compiled module comes back as the module; what was compiled stays",
        "it is a module like any other, with one inside",
        self_tests.compiled,
        "tests/kernel/test_private_gone.py::test_without_the_class_of_compiled_modules",
    ),
    Interface(
        "torch",
        "_checkpoint_wrapped_module",
        "nbdist/checkpoint/naming.py",
        "names in a checkpoint are without what activation checkpointing puts into them",
        "they are with it, and load into a model that is wrapped alike",
        self_tests.checkpoint_wrapper,
        "",
    ),
    Interface(
        "torch",
        "__composable_api_ _is_fsdp_managed_module _fsdp_use_orig_params _distribute_module_applied _is_param "
        "_fsdp_orig_uid",
        "nbdist/shipping/spread.py",
        "what sharding has set on a module and its parameters stays on the ranks",
        "those attributes come home with the module",
        self_tests.marks_of_sharding,
        "",
    ),
    Interface(
        "torch",
        "_fully_shard _subclasses",
        "nbdist/shipping/exporters.py nbdist/strategies/fsdp_repair.py",
        "what is sharded, fake or bound to a process stays on the ranks, by the full name of its class",
        "a class that has moved is found by its public name, or named as what cannot be packed",
        self_tests.classes_that_stay,
        "",
    ),
    Interface(
        "torch",
        "_device_count_nvml _device_count_amdsmi",
        "nbdist/config/gpus.py",
        "GPUs are counted without starting CUDA, with the notebook's own choice of them",
        "a child process of its own counts them",
        self_tests.counting_gpus,
        "tests/kernel/test_private_gone.py::test_without_counting_by_nvml",
    ),
    Interface(
        "Python",
        "memo",
        "nbdist/shipping/message.py",
        "pickle's memo gives the tokens by which both sides know the same object",
        "none: without it nothing can be shipped, and this self-test fails first",
        self_tests.memo_of_the_pickler,
        "",
    ),
    Interface(
        "Python",
        "_Unpickler",
        "nbdist/shipping/unpacking.py",
        "when one name cannot be decoded the others are, frame by frame",
        "all the names of that message are told to have failed",
        self_tests.python_unpickler,
        "tests/kernel/test_private_gone.py::test_without_the_unpickler_in_python",
    ),
    Interface(
        "Python",
        "_ITEMS",
        "nbdist/shipping/plain.py",
        "big lists are compared by the addresses of their items (the layout of list and tuple in CPython)",
        "item by item",
        self_tests.layout_of_lists,
        "tests/kernel/test_private_gone.py::test_without_the_layout_of_lists",
    ),
    Interface(
        "torch",
        "_device_count_nvml _device_count_amdsmi",
        "nbdist/config/gpus.py",
        "GPUs are counted without starting CUDA",
        "a process of its own counts them with CUDA, which takes two seconds",
        self_tests.count_without_cuda,
        "tests/config/test_gpus.py::test_without_torchs_own_count_a_child_counts",
    ),
    Interface(
        "Python",
        "_forkserver _forkserver_pid _resource_tracker _pid",
        "nbdist/launchers/supervisor.py",
        "which children of the supervisor are multiprocessing's own, and not what a dead rank left",
        "those that it has before the first rank; the fork server is the last of them",
        self_tests.children_of_multiprocessing,
        "tests/kernel/test_private_gone.py::test_without_multiprocessings_pids",
    ),
    Interface(
        "cloudpickle",
        "_with_slots",
        "nbdist/shipping/pickler.py",
        "a class with private slots is made with them (the tuple to which cloudpickle reduces a class)",
        "as cloudpickle does it: classes with private slots are named as what cannot be sent",
        self_tests.class_of_cloudpickle,
        "tests/kernel/test_private_gone.py::test_without_the_shape_of_cloudpickles_classes",
    ),
    Interface(
        "torch",
        "_tensor_str",
        "magics/settings.py magics/rank_settings.py",
        "torch.set_printoptions in the notebook holds on the ranks",
        "tensors are printed on the ranks as torch does by default",
        self_tests.print_options,
        "",
    ),
    Interface(
        "IPython",
        "RankShell",
        "magics/rank.py",
        "the shell of a rank: no history, no files, displays as records",
        "none: a rank whose shell cannot be made says so at its start",
        self_tests.shell,
        "",
    ),
    Interface(
        "ipykernel",
        "iopub_socket get_parent",
        "magics/output.py",
        "what a rank writes between cells lands under the cell that ran last",
        "it is printed where the kernel prints",
        self_tests.late_output,
        "",
    ),
)

# Names with an underscore that are documented all the same, or that others look for by getattr.
DOCUMENTED = {
    "_exit": "os._exit",
    "_getframe": "sys._getframe",
    "_current_frames": "sys._current_frames",
    "_is_gil_enabled": "sys._is_gil_enabled (3.13), looked for",
    "_fields": "namedtuple._fields",
    "_fields_": "ctypes.Structure",
    "_abc_impl": "what ABCMeta adds to a class: left out of it",
    "_render_traceback_": "IPython shows an exception by it",
    "_ipython_display_": "IPython lets an object display itself by it",
    "_dh": "IPython's history of folders",
    "_ih": "IPython's list of inputs",
    "_oh": "IPython's outputs by number",
    "_exit_code": "IPython's variable for the end of !command",
    "_stand_in": "a name in code that nbdist writes: the frame of an exception again",
    "_no_split_modules": "transformers' word for blocks that stay whole, looked for",
    "_tp_plan": "transformers' word for how layers are split over ranks, looked for",
    "_original_forward": "accelerate's mark on a module, looked for",
    "_distributed": "of datasets.IterableDataset, looked for: already split by rank",
}


def check() -> list[tuple[Interface, str]]:
    """Try every self-test here: (interface, "" or what went wrong)."""
    told = []
    for interface in INTERFACES:
        try:
            interface.self_test()
            told.append((interface, ""))
        except Exception as error:
            told.append((interface, f"{type(error).__name__}: {error}"))
    return told


def main() -> int:
    """Print the list with what the self-tests say; the number of those that fail."""
    from importlib.metadata import version

    print(", ".join(f"{name} {version(name)}" for name in ("torch", "cloudpickle", "IPython", "ipykernel")))
    failed = 0
    for interface, trouble in check():
        failed += bool(trouble)
        print(f"{'FAILS' if trouble else 'works':6} {interface.of}: {interface.names}\n       {interface.what_for}")
        if trouble:
            print(f"       {trouble}\n       instead: {interface.fallback}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
