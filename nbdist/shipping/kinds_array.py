"""The kinds of arrays: numpy's, and subclasses of them. Content is compared by hash, and copied in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from nbdist.shipping.chunks import Patch, Pieces, digest_of, runs_of
from nbdist.shipping.kinds import CannotApply, Kind, Snapshot
from nbdist.shipping.kinds_memory import Content, array_extent, comparable, dense
from nbdist.shipping.lazy import numpy_if_loaded
from nbdist.shipping.memory import INLINE


def strides_of(array: Any) -> Any:
    return None if array.flags.c_contiguous else array.strides


class ArrayKind(Kind):
    letter = "N"

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        if value.dtype.names is not None and value.dtype.hasobject:
            return self._snap_fields(value, light)
        if value.dtype.hasobject:
            return (value.shape, str(value.dtype), value.flags.writeable), tuple(value.ravel().tolist())
        if light:
            return (), ()
        if digest is None:
            digest = self.digest(value)
        return (value.shape, value.dtype, value.flags.writeable, digest), ()

    def _snap_fields(self, value: Any, light: bool) -> tuple[Any, tuple[Any, ...]]:
        """Of records that hold objects: the objects by identity, the other fields by hash."""
        references: list[Any] = []
        digests = []
        for field in _fields(value):
            if field.dtype.hasobject:
                references.extend(field.ravel().tolist())
            elif not light:
                digests.append(xxhash.xxh3_64_intdigest(field.tobytes()))
        return (value.shape, str(value.dtype), value.flags.writeable, tuple(digests)), tuple(references)

    def digest(self, value: Any) -> Any:
        return strides_of(value), digest_of(*array_extent(value))

    def shape(self, value: Any) -> Any:
        return value.shape, str(value.dtype)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        if value.dtype.names is not None and value.dtype.hasobject:
            fields = [f.ravel().tolist() if f.dtype.hasobject else f.copy() for f in _fields(value)]
            return value.shape, fields, value.flags.writeable
        if value.dtype.hasobject:
            return value.shape, value.ravel().tolist(), value.flags.writeable
        if old is not None and old[0] == self.letter and old[1][:2] == new[1][:2] and comparable(old[1][3], new[1][3]):
            address, length = array_extent(value)
            strides = [stride / value.itemsize for stride in value.strides]
            if length >= INLINE and dense(value.shape, strides):
                form = (value.dtype, value.shape, value.strides, length)
                runs = runs_of(address, length, old[1][3][1], new[1][3][1])
                return Pieces(value, form, address, runs), None, value.flags.writeable
        return Content(value.view()), None, value.flags.writeable

    def sent(self, change: Any) -> Iterable[Any]:
        return change[1] or ()

    def apply(self, value: Any, change: Any) -> None:
        content, objects, writeable = change
        if objects is not None:
            shape = content
            if value.shape != shape:
                raise CannotApply(f"an array of objects was reshaped in place to {shape}")
            if value.dtype.names is not None:
                _put_fields(value, objects, writeable)
                return
            if not value.flags.writeable:
                value.flags.writeable = True
            flat = value.reshape(-1)
            for index, item in enumerate(objects):
                flat[index] = item
            if not _shares(value, flat):
                value[...] = flat.reshape(shape)
            if not writeable:
                value.flags.writeable = False
            return
        if type(content) is Patch:
            if (value.dtype, value.shape, value.strides) != content.form[:3]:
                raise CannotApply("an array changed its shape or type in place")
            if not value.flags.writeable:
                value.flags.writeable = True
            content.write(array_extent(value)[0])
            if not writeable:
                value.flags.writeable = False
            return
        if value.dtype == content.dtype and value.shape != content.shape and value.size == content.size:
            try:
                value.shape = content.shape
            except AttributeError:
                pass
        if value.shape != content.shape or value.dtype != content.dtype:
            raise CannotApply("an array changed its shape or type in place", content.copy())
        if not value.flags.writeable:
            value.flags.writeable = True
        value[...] = content
        if not writeable:
            value.flags.writeable = False


def _fields(value: Any) -> list[Any]:
    """An array's fields, those of inner records too, as views of it."""
    if value.dtype.names is None:
        return [value]
    return [field for name in value.dtype.names for field in _fields(value[name])]


def _put_fields(value: Any, contents: list[Any], writeable: bool) -> None:
    if not value.flags.writeable:
        value.flags.writeable = True
    for field, content in zip(_fields(value), contents, strict=True):
        if not field.dtype.hasobject:
            field[...] = content
            continue
        whole = field if field.ndim else field.reshape(1)  # an item that is a sequence would be spread over a scalar
        for index, item in zip(_numpy().ndindex(whole.shape), content, strict=True):
            whole[index] = item
    if not writeable:
        value.flags.writeable = False


def _numpy() -> Any:
    return numpy_if_loaded()


def _shares(one: Any, other: Any) -> bool:
    numpy = numpy_if_loaded()
    return bool(numpy.may_share_memory(one, other))


class SubarrayKind(ArrayKind):
    """Subclasses of ndarray (masked, memory-mapped, records, the user's own): an array, and attributes."""

    letter = "Z"

    def attributes(self, value: Any) -> dict[str, Any]:
        return {name: content for name, content in vars(value).items() if name != "_mmap"}  # each side's own

    def snap(self, value: Any, digest: Any = None, light: bool = False) -> tuple[Any, tuple[Any, ...]]:
        scalars, references = super().snap(plain(value), None, light)
        own = self.attributes(value)
        return (scalars, tuple(own)), (type(value), *own.values(), *references)

    def change(self, value: Any, old: Snapshot | None, new: Snapshot) -> Any:
        array = plain(value)
        unchanged = old is not None and old[0] == self.letter and old[1][0] == new[1][0] and not array.dtype.hasobject
        return None if unchanged else super().change(array, None, new), self.attributes(value)

    def sent(self, change: Any) -> Iterable[Any]:
        return (*(super().sent(change[0]) if change[0] is not None else ()), *change[1].values())

    def apply(self, value: Any, change: Any) -> None:
        array, own = change
        if array is not None:
            super().apply(plain(value), array)
        for name in [name for name in self.attributes(value) if name not in own]:
            del value.__dict__[name]
        value.__dict__.update(own)

    def reduced(self, value: Any) -> Any:
        return view_as, (plain(value), type(value)), self.attributes(value), None, None, fill_subarray


def plain(value: Any) -> Any:
    """An array without its class: a view of the same memory."""
    numpy = numpy_if_loaded()
    return numpy.ndarray.view(value, numpy.ndarray)


def view_as(array: Any, cls: type) -> Any:
    return numpy_if_loaded().ndarray.view(array, cls)


def fill_subarray(value: Any, attributes: dict[str, Any]) -> None:
    value.__dict__.update(attributes)
