"""The pickler for both directions. What it takes apart is made again by `rebuilding`.

Three objects are in its memo from the start, under the same index on both sides: the namespace, the memory of the
message, and the side itself. So what is rebuilt shares the rank's globals and segments without any global of ours.
"""

from __future__ import annotations

import enum
import io
import marshal
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import xxhash

from nbdist.shipping.chunks import Pieces, make_patch
from nbdist.shipping.classify import Classifier, by_reference
from nbdist.shipping.errors import StaysOnRank
from nbdist.shipping.handle import RankedValue, handle_facts
from nbdist.shipping.kinds import Stays, Unwrapped
from nbdist.shipping.kinds_array import SubarrayKind
from nbdist.shipping.kinds_container import DictKind, ListKind, SetKind, unfilled
from nbdist.shipping.kinds_memory import Content, array_extent, freed, has_plain_memory, tensor_extent
from nbdist.shipping.kinds_object import ModuleKind, ObjectKind, OptimizerKind, ScalerKind
from nbdist.shipping.kinds_special import (
    ExceptionKind,
    MadeModuleKind,
    ProxyKind,
    RemovableHandleKind,
    VariablesOf,
    ViewKind,
    WeakKind,
    behind_proxy,
)
from nbdist.shipping.lazy import numpy_if_loaded, torch_if_loaded
from nbdist.shipping.memory import Outgoing
from nbdist.shipping.modules import find_module, importable, submodules
from nbdist.shipping.rebuilding import (
    itself,
    make_array,
    make_copy,
    make_function,
    make_storage,
    make_tensor,
    make_typed_storage,
    ranks_own,
    rebuild_quietly,
    scope_of,
    set_function,
    set_read_only,
    set_tensor,
)
from nbdist.shipping.reducers import REDUCERS
from nbdist.shipping.regions import raw
from nbdist.shipping.spread import SPREAD, is_parameter, leaves_gradient, own_of, whole_of
from nbdist.shipping.views import KnownMemory, make_array_view, make_tensor_view

NAMESPACE, MEMORY, SIDE, FIRST = 0, 1, 2, 3


class CellRef:
    """Stands for a closure's cell among a function's arguments: an empty cell, filled by the function's state.

    So that functions which share a cell still share it, and recursion through a cell is no trouble.
    """

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __reduce__(self) -> Any:
        return types.CellType, ()


class Packer(cloudpickle.Pickler):
    """Pickles one message in frames (one `frame` call each) that share a memo."""

    def __init__(
        self, stream: io.BytesIO, namespace: dict[str, Any], memory: Outgoing, side: Any, kinds: Classifier
    ) -> None:
        super().__init__(stream, protocol=5)
        self.namespace, self.outgoing, self.side, self.kinds = namespace, memory, side, kinds
        self.cells: dict[int, CellRef] = {}
        self.known_cells: set[int] = set()
        self.known_memory: Callable[[], KnownMemory] | None = None
        self.known: Callable[[int], Any] = lambda key: None
        self.unhooked = 0  # tensors whose register_hook functions are left behind
        self.modules: set[str] = set()  # that what is pickled refers to

    def frame(self, content: Any) -> None:
        """Pickle without cloudpickle's wrapper, which turns a RecursionError into a PicklingError without the cause."""
        pickle.Pickler.dump(self, content)

    def reducer_override(self, value: Any) -> Any:
        cls = type(value)
        kind = self.kinds.of_type(cls)
        if isinstance(kind, Stays):
            raise StaysOnRank(kind.reason)
        if isinstance(kind, Unwrapped):
            return itself, (kind.unwrap(value),)
        if cls is Content:
            return self._memory(value.value, type(value.value), fresh=True) or (itself, (value.value,))
        if cls is Pieces:
            add, address, owner = self.outgoing.add, value.address, value.value
            parts = [(offset, add(address + offset, length, owner)) for offset, length in value.runs]
            return make_patch, (self.outgoing, value.form, parts)
        if kind is SPREAD:
            return self._spread(value)
        if cls is RankedValue:
            return self._handle(value)
        if isinstance(value, enum.Enum) and cls.__members__.get(value.name) is value:
            return getattr, (cls, value.name)  # by its value it would have to be hashable
        if cls in REDUCERS:
            return REDUCERS[cls](value)
        if isinstance(kind, WeakKind | RemovableHandleKind):
            return kind.reduced(value)
        if isinstance(kind, SubarrayKind | ExceptionKind | ViewKind):
            return kind.reduced(value)
        if isinstance(kind, ProxyKind):
            return types.MappingProxyType, (behind_proxy(value),)
        if isinstance(kind, ObjectKind):
            return self._object(value, kind)
        if isinstance(kind, ListKind | DictKind | SetKind) and (made := unfilled(value)) is not None:
            return made
        if cls is types.FunctionType:
            return self._function(value)
        if cls is types.CodeType:
            # cloudpickle puts "<dynamic-code>" in place of the file name, which tracebacks need. Both sides are the
            # same Python.
            return marshal.loads, (marshal.dumps(value),)
        memory = self._memory(value, cls)
        if memory is not None:
            return memory
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, io.TextIOBase):
            return self._stream(value)
        if isinstance(value, type):
            self._refer(value.__module__, "its class" if self.kinds.of(value) is None else "")
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple) and value.__dict__.get("__slots__"):
            return _with_slots(value, reduced)
        return reduced

    def _handle(self, value: RankedValue) -> Any:
        facts = handle_facts(value)
        if facts.dead:
            raise StaysOnRank("it stayed on ranks that were replaced")
        if facts.pool is not self.side:
            raise StaysOnRank("it stays on the ranks of another pool")
        return ranks_own, (self.side, facts.key, facts.name, facts.path)

    def _refer(self, name: Any, what: str) -> None:
        """Something is pickled by the name of its module."""
        if not what or not isinstance(name, str) or name in self.modules:
            return
        if not importable(name):
            raise StaysOnRank(f"{what} is in module {name!r}, which has no file that the ranks could import")
        self.modules.add(name)

    def _module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        kind = self.kinds.of(module)
        if isinstance(kind, MadeModuleKind):
            return kind.reduced(module)
        if sys.modules.get(name) is not module:
            return super().reducer_override(module)
        self._refer(name, "it")
        return find_module, (name, submodules(module))

    def _stream(self, value: io.TextIOBase) -> Any:
        """A rank's own stdout for the notebook's. cloudpickle would send the text of an open file, and the copy would
        not be the file.
        """
        for name in ("stdout", "stderr"):
            if value is getattr(sys, name) or value is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
        if isinstance(value, io.StringIO):
            return NotImplemented
        raise StaysOnRank("an open file belongs to its process")

    def _object(self, value: Any, kind: ObjectKind) -> Any:
        if isinstance(kind, OptimizerKind | ModuleKind | ScalerKind):
            reduced = kind.reduced(value)
            if reduced is not None:
                return reduced
        if kind.strip is None or not kind.strip(value.__dict__):
            return NotImplemented
        reduced = value.__reduce_ex__(5)
        names = set(kind.strip(value.__dict__))
        state = reduced[2]
        if isinstance(state, dict):
            state = {name: content for name, content in state.items() if name not in names}
        return (*reduced[:2], state, *reduced[3:])

    # -- memory

    def _memory(self, value: Any, cls: type, fresh: bool = False) -> Any:
        """How a tensor, storage or array travels; None for other types. `fresh`: not as a view of what is known."""
        torch = torch_if_loaded()
        if torch is not None:
            if issubclass(cls, torch.Tensor):
                return self._tensor(value, cls, torch, fresh)
            if cls is torch.UntypedStorage:
                if value.device.type != "cpu":
                    return None
                if value.nbytes() and not value.data_ptr():
                    raise StaysOnRank("its memory was taken away")
                ref = self.outgoing.add(value.data_ptr(), value.nbytes(), value, torch=True)
                return make_storage, (self.outgoing, ref, value.nbytes())
            if cls is torch.storage.TypedStorage:
                with warnings.catch_warnings(action="ignore"):  # it warns that the class goes away
                    return make_typed_storage, (value.untyped(), value.dtype)
            if cls is torch.Generator:
                return None
        numpy = numpy_if_loaded()
        if numpy is not None and cls is numpy.ndarray and not value.dtype.hasobject:
            extent = array_extent(value)
            held = None if fresh else self._held(value, *extent)
            if held is not None:
                shape = (value.dtype, value.shape, value.strides, value.flags.writeable)
                return make_array_view, (*held, extent[1], *shape)
            ref = self.outgoing.add(*extent, value)
            return make_array, (self.outgoing, ref, value.dtype, value.shape, value.strides, value.flags.writeable)
        if numpy is not None and cls is numpy.ndarray and not value.flags.writeable:
            return (*value.__reduce_ex__(2), None, None, set_read_only)  # pickle forgets it
        return None

    def _tensor(self, value: Any, cls: type, torch: Any, fresh: bool) -> Any:
        if freed(value):
            raise StaysOnRank("its memory was taken away (a sharded parameter)")
        if getattr(value, "_backward_hooks", None):
            self.unhooked += 1
        exact = cls is torch.Tensor or cls is torch.nn.Parameter
        leaf = value.is_leaf
        grad = value.grad if leaf else None
        own = dict(value.__dict__)
        extent = tensor_extent(value) if exact and has_plain_memory(value) else None
        held = self._held(value, *extent) if extent is not None and not fresh else None
        inner = self._inside(value, *extent) if extent is not None and not fresh and held is None else []
        state = (grad, own, inner, self.side if inner else None) if grad is not None or own or inner else None
        setter = (None, None, set_tensor) if state is not None else ()
        if extent is not None:
            if held is not None:
                form = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad and leaf)
                view = (*held, extent[1], *form, cls is torch.nn.Parameter)
                return (make_tensor_view, view, state, *setter) if state is not None else (make_tensor_view, view)
            ref = self.outgoing.add(*extent, value, torch=True)
            arguments = (
                self.outgoing, ref, value.dtype, tuple(value.shape), value.stride(),
                value.requires_grad and leaf, cls is torch.nn.Parameter,
            )  # fmt: skip
            return (make_tensor, arguments, state, *setter) if state is not None else (make_tensor, arguments)
        if exact and value.device.type not in ("cpu", "meta") and value.layout is torch.strided:
            copy = value.detach().resolve_conj().resolve_neg().cpu()
            on_cpu = (copy, value.requires_grad and leaf, cls is torch.nn.Parameter)
            return (make_copy, on_cpu, state, *setter) if state is not None else (make_copy, on_cpu)
        if not leaf and exact:
            return itself, (value.detach(),)
        if exact and (value.layout is not torch.strided or value.is_quantized or value.is_nested):
            with warnings.catch_warnings(action="ignore"):
                function, arguments, *more = value.__reduce_ex__(5)
            return rebuild_quietly, (function, arguments), *more
        return None

    def _spread(self, value: Any) -> Any:
        """A tensor that is spread over the ranks: the whole of it."""
        torch: Any = torch_if_loaded()
        whole, own = whole_of(value), own_of(value)
        grad = value.grad if value.is_leaf and not leaves_gradient(value) else None
        parameter = is_parameter(value)
        ref = self.outgoing.add(*tensor_extent(whole), whole, torch=True)
        leaf = value.requires_grad and value.is_leaf
        form = (whole.dtype, tuple(whole.shape), whole.stride(), leaf, parameter)
        if whole.layout is not torch.strided:
            raise StaysOnRank("its parts are not strided")
        made = (make_tensor, (self.outgoing, ref, *form))
        return (*made, (grad, own, [], None), None, None, set_tensor) if grad is not None or own else made

    def _held(self, value: Any, address: int, length: int) -> tuple[Any, int] | None:
        """The known object whose memory a new tensor or array looks at."""
        if self.known_memory is None or self.known(id(value)) is not None:
            return None
        return self.known_memory().holder(address, length)

    def _inside(self, value: Any, address: int, length: int) -> list[tuple[Any, int]]:
        """Known tensors that look at a part of a new one's memory. Moved on ranks only, never in the notebook."""
        if self.known_memory is None or not self.side.moves_memory or self.known(id(value)) is not None:
            return []
        return self.known_memory().inside(address, length)

    # -- functions

    def _function(self, function: types.FunctionType) -> Any:
        if by_reference(function):
            self._refer(function.__module__, "it")
            return NotImplemented
        if function.__globals__ is self.namespace:
            scope: Any = self.namespace
        else:
            scope = _module_scope(function) or self._made_scope(function)
            if scope is None:
                return super().reducer_override(function)
        cells: tuple[Any, ...] | None = None
        filled: tuple[Any, ...] = ()
        if function.__closure__ is not None:
            cells = tuple(
                cell if id(cell) in self.known_cells else self.cells.setdefault(id(cell), CellRef(cell))
                for cell in function.__closure__
            )
            filled = tuple(
                (ref, (ref.cell.cell_contents,))
                for ref in cells
                if isinstance(ref, CellRef) and ref.cell != types.CellType()
            )
        own = {
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__annotations__": function.__annotations__,
        }
        if getattr(function, "__type_params__", ()):
            own["__type_params__"] = function.__type_params__  # type: ignore[attr-defined]
        state = (own, dict(function.__dict__), filled)
        return make_function, (function.__code__, scope, cells), state, None, None, set_function

    def _made_scope(self, function: types.FunctionType) -> VariablesOf | None:
        reference = self.kinds.made.get(id(function.__globals__))
        module = reference() if reference is not None else None
        return VariablesOf(module) if module is not None and module.__dict__ is function.__globals__ else None


def _with_slots(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have the slots made with the class: cloudpickle sets `__slots__` afterwards, and trips over private names."""
    try:
        function, (constructor, name, bases, keywords, *rest), (attributes, slotted), *more = reduced
    except (TypeError, ValueError):  # another cloudpickle: then as it does it
        return reduced
    slots = cls.__slots__  # type: ignore[attr-defined]
    keywords = {**keywords, "__slots__": slots if isinstance(slots, str) else tuple(slots)}
    own = {
        key: value
        for key, value in attributes.items()
        if key != "__slots__" and not isinstance(value, types.MemberDescriptorType)
    }
    return (function, (constructor, name, bases, keywords, *rest), (own, slotted), *more)


class ModuleScope:
    """Stands for the globals of an importable module: a function made there shares them on the other side as well."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return scope_of, (self.name,)


def _module_scope(function: types.FunctionType) -> ModuleScope | None:
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    if module is None or module.__dict__ is not function.__globals__:
        return None
    return ModuleScope(module.__name__)


class _DigestPickler(Packer):
    """Pickles to compare only: memory is hashed, and what may not leave does not matter."""


def digest_of_pickle(value: Any) -> int:
    """The hash of what a value pickles to, its memory included."""
    stream, memory = io.BytesIO(), Outgoing()
    packer = _DigestPickler(stream, {}, memory, None, Classifier())
    packer.frame(value)
    digest = xxhash.xxh3_64(stream.getbuffer())
    for address, length, _ in memory.intervals:
        digest.update(raw(address, length))
    return digest.intdigest()
