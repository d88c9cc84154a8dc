"""The members of the Accelerator about checkpoints."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from nbdist import checks, state
from nbdist.checkpoint import naming
from nbdist.checkpoint.asynchronous import Background
from nbdist.kwargs import ProjectConfiguration

if TYPE_CHECKING:
    from nbdist.checkpoint.loading import Loaded


class Checkpoints:
    """Saving and loading of all that was prepared. Reads what the Accelerator's constructor makes."""

    project_configuration: ProjectConfiguration
    _named: naming.Prepared
    _save_hooks: OrderedDict[int, Callable[..., Any]]
    _load_hooks: OrderedDict[int, Callable[..., Any]]

    unwrap_model: Callable[..., Any]

    def _remember(self) -> None:
        """Set up what is remembered of what was prepared."""
        self._named = naming.Prepared()
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._behind = Background()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save all that was prepared or registered: models, optimizers, schedulers, loaders with their positions, the
        loss scaler, the random generators of each rank. A collective: all ranks call it.

        Each rank writes its part of what is sharded. It is written beside its place and renamed: what was saved under
        this name before stays until the new one is whole. Everything has the name of its variable, and loads by it.

        Args:
            output_dir: the folder of this checkpoint. Default: with `automatic_checkpoint_naming` the next
                `checkpoint_<n>` of the project's folder `checkpoints`, of which `total_limit` are kept.
            safe_serialization: no effect: nothing is ever pickled.
            async_save: return when the values are copied in memory, and write them behind the training loop, which a
                line says when it is done. The next save waits for it; so do `wait_for_checkpoint` and the end of a
                script. That memory is kept for the next time; `free_memory` gives it back.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: no folder is named; or it holds something that is no checkpoint. TypeError: a state that no
                checkpoint can hold; says what. OSError: it cannot be written. On each rank, where it is so on one;
                nothing is overwritten then.
        """
        checks.flag(safe_serialization, "save_state: safe_serialization", True)
        if save_model_func_kwargs:
            raise TypeError(f"save_state has no argument {next(iter(save_model_func_kwargs))!r}")
        async_save = checks.flag(async_save, "save_state: async_save")
        from nbdist.checkpoint import behind, saving

        self._finish_last()
        snapshot = saving.snapshot(self, output_dir, list(self._save_hooks.values()))
        configuration = self.project_configuration
        following = snapshot.held.contents["accelerator"]["next"]
        if following is not None:
            folder = os.path.dirname(snapshot.path)
            snapshot.after = lambda: saving.limit(folder, configuration.total_limit, snapshot.path)
        if async_save:
            behind.begin(self._behind, snapshot)
        else:
            saving.write(snapshot)
        if following is not None:
            configuration.iteration = following
        return snapshot.path

    def wait_for_checkpoint(self) -> None:
        """Wait for the save that `save_state(async_save=True)` has begun, if there is one. A collective: all ranks call
        it. `save_state` and `load_state` do.

        Raises:
            What that save failed with, once; on each rank, where it is so on one. What had its name before is there.
        """
        self._finish_last()

    def _finish_last(self) -> None:
        for one in list(state.unfinished):  # also of an Accelerator that a cell has made anew since
            one.finish()
        if self._behind.what is not None:  # on all ranks, or on none
            from nbdist.checkpoint import behind

            behind.wait(self._behind)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights as transformers, Accelerate and safetensors read them: `model.safetensors`; or
        `model-00001-of-00002.safetensors`, ... and `model.safetensors.index.json`.

        The names are the model's own. A tensor under several names is stored once; the file's metadata say which name
        it has there for each other one. All is written beside its place, so that what was there stays until the new is
        whole; then what an earlier save of another size has left is removed. Other files stay.

        The main process writes. Where it has the whole model it may do so alone; where the model is sharded all ranks
        call it, and tensors are gathered one by one.

        Args:
            model: what `prepare` returned, or a model as it is.
            save_directory: the folder; it is made.
            max_shard_size: the most bytes of tensors in a file ("10GB", "500MB", 2**30). A bigger tensor has a file for
                itself.
            safe_serialization: False: `pytorch_model.bin`, by torch.save, which also takes what is no tensor and loads
                with weights_only. It needs memory for a file.

        Raises:
            ValueError: a tensor that the format cannot hold, or a size that is none. OSError: it cannot be written.
                Nothing is overwritten then. Where the model is sharded it is raised on each rank.
        """
        checks.kind(model, torch.nn.Module, "save_model: model", "a torch.nn.Module")
        from nbdist.checkpoint import export

        export.save_model(
            self.unwrap_model(model, keep_torch_compile=False),
            save_directory,
            max_shard_size,
            safe_serialization,
            self.project_configuration.save_on_each_node,
        )

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True, *, all_ranks: bool = False) -> dict[str, Any]:
        """A model's whole state, under the model's own names.

        The main process gets a copy on the CPU, which training does not change. Where the model is sharded, all ranks
        call it: tensors are gathered one by one, and the other ranks get an empty dict. Where each rank has the whole
        model, the others get the model's very tensors, as from `model.state_dict()`.

        Args:
            model: what `prepare` returned, or a model as it is.
            unwrap: False: names have the parts that a torch.compile of yours has put into them.
            all_ranks: every rank gets such a copy.
        """
        checks.kind(model, torch.nn.Module, "get_state_dict: model", "a torch.nn.Module")
        unwrap = checks.flag(unwrap, "get_state_dict: unwrap", True)
        from nbdist.checkpoint import export

        bare = self.unwrap_model(model, keep_torch_compile=not unwrap)
        return export.get_state_dict(bare, unwrap, checks.flag(all_ranks, "get_state_dict: all_ranks"))

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        names: Mapping[str, str] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Loaded:
        """Load what `save_state` has saved, under any strategy and number of ranks. A collective: all ranks call it.

        All is compared with what is prepared here, read and checked before anything is changed.

        Args:
            input_dir: the checkpoint's folder. Default: with `automatic_checkpoint_naming` the latest.
            load_kwargs: no effect, nor has `map_location`: everything goes where what it is loaded into is.
            strict: all that is in the checkpoint must be here, and the other way. False: load what both have.
            names: for names in the checkpoint those that they have here, as {"net": "model"}.

        Returns:
            What was loaded.

        Raises:
            ValueError: it does not fit what is prepared here, which the message lists; or there is no checkpoint; or it
                is damaged. On each rank, where it is so on one; nothing is changed then.
        """
        from nbdist.checkpoint import loading

        self._finish_last()
        load_model_func_kwargs.pop("map_location", None)
        if load_model_func_kwargs:
            raise TypeError(f"load_state has no argument {next(iter(load_model_func_kwargs))!r}")
        strict = checks.flag(strict, "load_state: strict", True)
        checks.kind(names, Mapping | None, "load_state: names", "a dict: for names in the checkpoint those here")
        return loading.load(self, input_dir, strict, names or {}, list(self._load_hooks.values()))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """From now on `save_state` and `load_state` save and load these too, by the names of their variables.

        Args:
            *objects: with `state_dict` and `load_state_dict` each. What rank 0's `state_dict` gives is saved, but for
                DTensors, of which each rank has a part. They are kept alive.

        Raises:
            ValueError: one has no such methods.
        """
        wrong = [
            checks.short(one)
            for one in objects
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)))
        ]
        if wrong:
            raise ValueError(
                "register_for_checkpointing takes objects with state_dict and load_state_dict; these have none: "
                + ", ".join(wrong)
            )
        for one in objects:
            self._named.note("objects", one, one)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call a function before each `save_state`, on each rank.

        Args:
            hook: called as hook(models, weights, output_dir). Files that it writes to output_dir are a part of the
                checkpoint. What it takes out of the list `weights` is not saved.

        Returns:
            A handle, whose `remove` takes it off again.
        """
        checks.called(hook, "register_save_state_pre_hook: hook", "a function of (models, weights, output_dir)")
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call a function in each `load_state`, on each rank, when the checkpoint was read and before it is loaded.

        Args:
            hook: called as hook(models, input_dir). What it takes out of the list `models` is not loaded.

        Returns:
            A handle, whose `remove` takes it off again.
        """
        checks.called(hook, "register_load_state_pre_hook: hook", "a function of (models, input_dir)")
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle
