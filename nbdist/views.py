"""A view of a module: the user's module again, called in another way. Nothing is written into the module itself.

A view is an instance of a subclass of the module's own class that has the module's very `__dict__`: parameters,
submodules, hooks, attributes and `training` are one and the same, and what is set on one is set on both. So isinstance,
state_dict keys and methods are the user's own, and methods that call `self(...)` call the view. Only what stands in
front of a call differs: autocast, the dtype of what is given back, and a compiled form of the call.

A view belongs to its process: pickled, copied or shipped it is the module.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

import torch

from nbdist.precision import Precision
from nbdist.shipping.exporters import register_exporter


class View:
    """What stands in front of the user's class in a view's class."""

    __slots__ = ()
    _nbdist_precision: ClassVar[Precision]
    _nbdist_model: torch.nn.Module  # the user's very object
    _nbdist_compiled: Callable[..., Any] | None  # what is called instead of the class's own __call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._nbdist_compiled
        call = super().__call__ if compiled is None else compiled  # type: ignore[misc]
        precision = self._nbdist_precision
        if not precision.mixed:
            return call(*args, **kwargs)
        with precision.autocast():
            output = call(*args, **kwargs)
        return precision.output(output)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._nbdist_model,)

    def __copy__(self) -> Any:
        return copy.copy(self._nbdist_model)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._nbdist_model, memo)


# The living views by the module's id and by how they call it. A view keeps its module alive, so no id is another's.
_views: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def view(model: torch.nn.Module, precision: Precision, compiling: dict[str, Any] | None = None) -> torch.nn.Module:
    """The view of a module, or of a view's module. There is one for each precision and way to compile.

    Args:
        model: a module of any class, also from torch.jit or torch.compile.
        precision: in what it computes.
        compiling: arguments of torch.compile for its call. None: it is not compiled.

    Raises:
        RuntimeError: a lazy module before its first call. TypeError: a class that cannot have subclasses.
    """
    model = bare(model)
    key = (id(model), precision, None if compiling is None else repr(sorted(compiling.items())))
    found = _views.get(key)
    if found is not None:
        return found
    if isinstance(model, torch.nn.modules.lazy.LazyModuleMixin) and model.has_uninitialized_params():
        raise RuntimeError(
            f"{type(model).__name__} is lazy, and has no parameters yet: call it once before prepare, so that it "
            "becomes what it will be"
        )
    new: Any = object.__new__(_class_of_views(type(model), precision))
    object.__setattr__(new, "__dict__", vars(model))
    object.__setattr__(new, "_nbdist_model", model)
    compiled = None
    if compiling is not None:
        # The view and its compiled call are a cycle; it goes with the view.
        compiled = torch.compile(type(model).__call__.__get__(new), **compiling)
    object.__setattr__(new, "_nbdist_compiled", compiled)
    _views[key] = new
    return new


def bare(model: Any) -> Any:
    """The user's very object, from a view of it; anything else as it is."""
    return object.__getattribute__(model, "_nbdist_model") if isinstance(model, View) else model


def _class_of_views(cls: type, precision: Precision) -> type:
    known: Any
    for known in type.__subclasses__(cls):  # which holds them weakly, so a class that is gone takes its views' along
        if issubclass(known, View) and known._nbdist_precision == precision:
            return known
    body: dict[str, Any] = {
        "__slots__": ("_nbdist_model", "_nbdist_compiled"),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_nbdist_precision": precision,
        **{name: _slot(name) for name in _slots(cls)},
    }
    if hasattr(cls, "_get_fsdp_state"):  # torch has noted it under the module itself
        body["_get_fsdp_state"] = lambda self: self._nbdist_model._get_fsdp_state()
    if precision.mixed:
        body |= {name: _method(cls, name, function) for name, function in methods(cls).items()}
    try:
        return type(cls)(cls.__name__, (View, cls), body)
    except TypeError as error:
        raise TypeError(
            f"{cls.__name__} cannot have a subclass ({error}), which mixed precision and torch.compile through prepare "
            "need. Prepare it with an Accelerator without them, and call it inside accelerator.autocast()"
        ) from error


def methods(cls: type) -> dict[str, FunctionType]:
    """The public methods that a user's module class adds to nn.Module's own, and `forward`.

    Generators and coroutines are left out: they run after they were called.
    """
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if (
            base in torch.nn.Module.__mro__
            or base is View
            or base.__module__.startswith(("torch.nn.", "torch.jit.", "torch.distributed."))
        ):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or (hasattr(torch.nn.Module, name) and name != "forward"):
                continue
            found.pop(name, None)
            if isinstance(value, FunctionType) and not (
                inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value)
            ):
                found[name] = value
    return found


def _method(cls: type, name: str, function: FunctionType) -> Any:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        precision = self._nbdist_precision
        call = getattr(cls, name)
        if precision.active:  # called by another method, or by __call__, which has done what there is to do
            return call(self, *args, **kwargs)
        with precision.autocast():
            output = call(self, *args, **kwargs)
        return precision.output(output)

    return method


def _slots(cls: type) -> list[str]:
    """The attributes that instances of a class have beside their `__dict__`."""
    names = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _slot(name: str) -> property:
    """A slot of the user's class: its value is in the user's object."""
    return property(
        lambda self: getattr(self._nbdist_model, name),
        lambda self, value: setattr(self._nbdist_model, name, value),
        lambda self: delattr(self._nbdist_model, name),
    )


def _itself(model: Any) -> Any:
    return model


register_exporter(View, unwrap=bare)
