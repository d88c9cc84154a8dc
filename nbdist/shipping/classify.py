"""From a value to its kind.

Decided once for each type, but for functions and classes, which are looked at one by one.
"""

from __future__ import annotations

import array
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import logging
import pathlib
import random
import re
import sys
import types
import typing
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import cloudpickle

from nbdist.shipping.exporters import exporter_of, registry_version
from nbdist.shipping.handle import RankedValue
from nbdist.shipping.kinds import (
    BuiltinMethodKind,
    CellKind,
    FrozenSetKind,
    FunctionKind,
    InstanceKind,
    Kind,
    MethodKind,
    Snapshot,
    Stays,
    TupleKind,
    Unwrapped,
)
from nbdist.shipping.kinds_array import ArrayKind, SubarrayKind
from nbdist.shipping.kinds_class import ClassKind
from nbdist.shipping.kinds_container import BytearrayKind, DequeKind, DictKind, ListKind, SetKind
from nbdist.shipping.kinds_memory import TensorKind
from nbdist.shipping.kinds_object import ModuleKind, ObjectKind, OptimizerKind, ScalerKind, parametrized
from nbdist.shipping.kinds_random import GeneratorKind
from nbdist.shipping.kinds_special import (
    ArrayOfNumbersKind,
    ExceptionKind,
    MadeModuleKind,
    ProxyKind,
    RemovableHandleKind,
    ViewKind,
    WeakKind,
    made_by_hand,
    pickles_as_exception,
    refers_weakly,
)
from nbdist.shipping.kinds_state import FrameKind, GetStateKind, OpaqueKind
from nbdist.shipping.lazy import numpy_if_loaded, torch_if_loaded
from nbdist.shipping.plain import BULK, LARGE, bulk_digest
from nbdist.shipping.reducers import REDUCERS
from nbdist.shipping.spread import SPREAD, is_spread_class, note_class

# Values: no identity that a notebook could see through nbdist, nothing inside to walk to.
_ATOMS: set[type] = {
    int, float, str, bytes, bool, type(None), complex, type(...), type(NotImplemented), range, slice,
    types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    weakref.ref, weakref.ProxyType, property, staticmethod, classmethod,
    datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone,
    decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern, logging.Logger, logging.RootLogger,
    pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath,
    typing.TypeVar, typing.ParamSpec, RankedValue,
}  # fmt: skip
ATOMS = frozenset(_ATOMS)

_LIST, _DICT, _SET, _DEQUE, _BYTES = ListKind(), DictKind(), SetKind(), DequeKind(), BytearrayKind()
_TUPLE, _FROZEN, _METHOD, _INSTANCE = TupleKind(), FrozenSetKind(), MethodKind(), InstanceKind()
_BUILTIN_METHOD = BuiltinMethodKind()
_FUNCTION, _CELL, _CLASS = FunctionKind(), CellKind(), ClassKind()
_SUBARRAY, _NUMBERS, _EXCEPTION = SubarrayKind(), ArrayOfNumbersKind(), ExceptionKind()
_TENSOR, _ARRAY, _RANDOM, _OPAQUE, _STATE = TensorKind(), ArrayKind(), GeneratorKind(), OpaqueKind(), GetStateKind()
_FRAME, _PROXY, _MADE, _HOOK = FrameKind(), ProxyKind(), MadeModuleKind(), RemovableHandleKind()
_WEAK: dict[type, Kind] = {
    weakref.WeakValueDictionary: WeakKind(),
    weakref.WeakKeyDictionary: WeakKind(),
    weakref.WeakSet: WeakKind(unordered=True),
}
_BULKY = frozenset({list, dict, set})

KINDS: dict[str, Kind] = {
    kind.letter: kind
    for kind in (
        _LIST, _DICT, _SET, _DEQUE, _BYTES, _FUNCTION, _CELL, _CLASS, _TENSOR, _ARRAY, _RANDOM, _OPAQUE, _STATE, BULK,
        ObjectKind(), ModuleKind(), OptimizerKind(), WeakKind(), _HOOK, _MADE, _FRAME, ScalerKind(), _SUBARRAY,
        _NUMBERS, _EXCEPTION,
    )
}  # fmt: skip


class _PerObject(Kind):
    pass


_LOOK = _PerObject()


class Classifier:
    """The kinds as one process sees them."""

    def __init__(self) -> None:
        self._by_type: dict[type, Kind | None] = dict.fromkeys(ATOMS)
        self._by_type.update({list: _LIST, dict: _DICT, set: _SET, tuple: _TUPLE, types.CellType: _CELL})
        self._by_type.update(_WEAK)
        self._by_type.update({types.MappingProxyType: _PROXY, memoryview: ViewKind(), array.array: _NUMBERS})
        self._by_type[types.FunctionType] = self._by_type[type] = self._by_type[types.ModuleType] = _LOOK
        # Large containers of plain data that are compared item by item all the same, by id: an object that is seen by
        # itself is in them.
        self.opened: dict[int, Any] = getattr(self, "opened", {})
        self.spread = getattr(self, "spread", False)  # a tensor that is spread over the ranks was met
        self.made: dict[int, weakref.ref[types.ModuleType]] = {}  # modules made by hand, by the id of their variables
        self._by_type[types.BuiltinFunctionType] = self._by_type[types.MethodWrapperType] = _LOOK
        self._seen = registry_version()

    def of_type(self, cls: type) -> Kind | None:
        """The kind of most instances of a class: None for values that are not walked."""
        if self._seen != registry_version():
            self.__init__()  # type: ignore[misc]  # an exporter was registered: decide afresh
        try:
            return self._by_type[cls]
        except KeyError:
            if len(self._by_type) > 10_000:  # the classes of a notebook come and go
                self.__init__()  # type: ignore[misc]
            kind = self._by_type[cls] = self._decide(cls)
            return kind

    def of(self, value: Any) -> Kind | None:
        """The kind of a value; None for one that is not walked."""
        kind = self.of_type(type(value))
        if kind is not _LOOK:
            return kind
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            return None if isinstance(value.__self__, types.ModuleType | type | None) else _BUILTIN_METHOD
        if type(value) is types.ModuleType:
            if not made_by_hand(value):
                return None
            self.made[id(value.__dict__)] = weakref.ref(value)
            return _MADE
        if by_reference(value):
            return None
        return _CLASS if isinstance(value, type) else _FUNCTION

    def look(self, value: Any, bulk: bool = False, old: Snapshot | None = None) -> tuple[Kind | None, Any]:
        """(kind, digest): as `of`, with the bulk rule applied to large containers of plain data.

        Args:
            bulk: it was such a container before, and need not be looked through again.
            old: its snapshot, if there is one.
        """
        kind = self.of(value)
        if kind is not None and type(value) in _BULKY and len(value) >= LARGE and id(value) not in self.opened:
            if bulk:
                return BULK, None
            digest = bulk_digest(value, old[1][0] if old is not None and old[0] == BULK.letter and old[1] else None)
            if digest is not None:
                return BULK, digest
        return kind, None

    def _decide(self, cls: type) -> Kind | None:
        exporter = exporter_of(cls)
        strip = None
        if exporter is not None:
            if exporter.stays is not None:
                return Stays(exporter.stays)
            if exporter.unwrap is not None:
                return Unwrapped(exporter.unwrap)
            strip = exporter.strip
        if issubclass(cls, type):
            return _LOOK
        if issubclass(cls, types.ModuleType):
            return None
        if cls in (type(sys.stdout), type(sys.stderr)):
            return None  # each process has its own
        memory = self._decide_memory(cls)
        if memory is not _LOOK:
            return memory
        if issubclass(cls, enum.Enum):
            return _INSTANCE
        if issubclass(cls, tuple):
            return _TUPLE
        if issubclass(cls, frozenset):
            return _FROZEN
        if cls is types.MethodType:
            return _METHOD
        if issubclass(cls, list):
            return _LIST if _default_reduce(cls, list) else _OPAQUE
        if issubclass(cls, OrderedDict | defaultdict | collections.Counter):
            return _DICT
        if issubclass(cls, dict):
            return _DICT if _default_reduce(cls, dict) else _OPAQUE
        if issubclass(cls, set):
            return _SET
        if issubclass(cls, deque):
            return _DEQUE
        if issubclass(cls, bytearray):
            return _BYTES
        if pickles_as_exception(cls):
            return _EXCEPTION
        if issubclass(cls, random.Random):
            return _RANDOM
        if (
            cls is functools.partial
            or cls in REDUCERS
            or cls in copyreg.dispatch_table
            or cls in cloudpickle.Pickler.dispatch_table
        ):
            return _OPAQUE
        if issubclass(cls, int | float | str | bytes | complex) and _default_reduce(cls, object):
            return _INSTANCE
        if cls.__module__.partition(".")[0] == "pandas":
            return _FRAME
        torch = torch_if_loaded()
        if refers_weakly(cls):
            return _HOOK
        if torch is not None and issubclass(cls, torch.nn.Module) and _module_state(cls, torch):
            note_class(cls)
            return ModuleKind(strip)
        if torch is not None and issubclass(cls, torch.optim.Optimizer) and _optimizer_state(cls, torch):
            return OptimizerKind(strip)
        if not _default_reduce(cls, object):
            return _OPAQUE
        if torch is not None and "torch.amp" in sys.modules and issubclass(cls, torch.amp.GradScaler):
            return ScalerKind(strip)
        if _has_own_getstate(cls):
            return _STATE
        if cls.__flags__ & (1 << 9) or cls.__dictoffset__:  # a class made in Python, or with a __dict__
            return ObjectKind(strip)
        return _OPAQUE

    def _decide_memory(self, cls: type) -> Kind | None:
        """The kinds of torch and numpy; _LOOK for any other type."""
        torch = torch_if_loaded()
        if torch is not None:
            if is_spread_class(cls):
                self.spread = True
                return SPREAD
            if issubclass(cls, torch.Tensor):
                return _OPAQUE if _dispatches(cls, torch) else _TENSOR
            if cls is torch.Generator:
                return _RANDOM
            if cls in (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format):
                return None
        numpy = numpy_if_loaded()
        if numpy is not None:
            if cls is numpy.ndarray:
                return _ARRAY
            if issubclass(cls, numpy.ndarray):
                return None if cls is numpy.ma.core.MaskedConstant else _SUBARRAY
            if issubclass(cls, numpy.generic) or issubclass(cls, numpy.dtype):
                return None
            if issubclass(cls, numpy.random.Generator | numpy.random.RandomState | numpy.random.BitGenerator):
                return _RANDOM
        return _LOOK


def _dispatches(cls: type, torch: Any) -> bool:
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _default_reduce(cls: type, base: type) -> bool:
    return cls.__reduce_ex__ is base.__reduce_ex__ and cls.__reduce__ is base.__reduce__


def _has_own_getstate(cls: type) -> bool:
    return getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)


def _module_state(cls: type, torch: Any) -> bool:
    """Does a module class pickle as nn.Module does?"""
    base = torch.nn.Module
    return (
        _default_reduce(cls, object)
        and (cls.__getstate__ is base.__getstate__ or parametrized(cls))
        and cls.__setstate__ is base.__setstate__  # type: ignore[attr-defined]
    )


def _optimizer_state(cls: type, torch: Any) -> bool:
    """Does an optimizer class pickle as torch's own do? Fabric's wrapper does too, but holds what its ranks set up."""
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    return (
        _default_reduce(cls, object)
        and cls.__getstate__ is torch.optim.Optimizer.__getstate__
        and not packages & {"lightning", "lightning_fabric", "pytorch_lightning"}
    )


def by_reference(value: Any) -> bool:
    """Can the other side import this function or class by its name?"""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if module is None or name is None:
        # types of the interpreter without a module, and TypeVars, go their own way
        return isinstance(value, type) and value.__module__ == "builtins"
    if module == "__main__" or "<locals>" in name:
        return False
    found: Any = sys.modules.get(module)
    if found is None:
        return False
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            # NoneType, ellipsis and their like are known to pickle by other means
            return module == "builtins"
    return found is value
