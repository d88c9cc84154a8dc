"""Random state of its own for code that draws from the process's generators: a user's sampler, a stream.

Going in and out is an exchange of the states of random, numpy and torch, some 3 us each way, as it happens at every
step of a stream: torch's is copied; numpy's is another bit generator in the same place; random's, which Python itself
copies as 625 numbers, is exchanged as memory.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch

_END = object()
_RANDOM: Any = numpy.random  # numpy's own types do not know all of it


class Sandbox:
    """Random state of its own: inside `with sandbox:` random, numpy and torch draw from it, outside nothing has
    changed.

    It goes on where it was when entered again, so a sampler may be pulled a few items at a time.

    Args:
        seed: where its state starts.
        samplers: those that have a `generator` attribute draw from a fresh one with this seed while inside.
    """

    def __init__(self, seed: int, *samplers: Any) -> None:
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "generator")]
        self._generator = torch.Generator().manual_seed(seed)
        self._theirs: list[Any] = []
        self._torch = torch.Generator().manual_seed(seed).get_state()  # the CPU's only: a device is not waited for
        self._python = Exchange(random.random.__self__, random.Random(seed))  # type: ignore[attr-defined]
        self._numpy = _Numpy(seed % 2**32)

    def __enter__(self) -> None:
        self._theirs = [sampler.generator for sampler in self._samplers]
        for sampler in self._samplers:
            sampler.generator = self._generator
        self._exchange()
        self._numpy.enter()

    def __exit__(self, *error: object) -> None:
        self._numpy.leave()
        self._exchange()
        for sampler, generator in zip(self._samplers, self._theirs, strict=True):
            sampler.generator = generator

    def around(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items, each of them taken inside."""
        while True:
            with self:
                item = next(items, _END)
            if item is _END:
                return
            yield item

    def _exchange(self) -> None:
        process = torch.random.default_generator
        theirs = process.get_state()
        process.set_state(self._torch)
        self._torch = theirs
        self._python.exchange()


class _Numpy:
    """A bit generator that takes the place of the process's, and back; where numpy cannot do that, states are copied.

    Args:
        seed: of ours, as numpy.random.seed takes it.
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = numpy.random.RandomState(seed).get_state(legacy=False)
        self._mine: _InPlace | None = None
        self._theirs: _InPlace | None = None
        if hasattr(_RANDOM, "set_bit_generator"):  # since numpy 1.24
            generator: Any = numpy.random.MT19937()
            generator.state = self._state
            self._mine = _InPlace(generator)

    def enter(self) -> None:
        if self._mine is None:
            self._copied()
            return
        generator = _RANDOM.get_bit_generator()
        if self._theirs is None or self._theirs.generator is not generator:
            self._theirs = _InPlace(generator)
            self._theirs.known = b""
        self._theirs.put_away()
        self._mine.put_in()

    def leave(self) -> None:
        if self._mine is None or self._theirs is None:
            self._copied()
            return
        self._mine.put_away()
        self._theirs.put_in()

    def _copied(self) -> None:
        state = numpy.random.get_state(legacy=False)
        numpy.random.set_state(self._state)
        self._state = state


class _InPlace:
    """A bit generator with what it would lose on the way: the second number of a pair that was drawn (`randn`). Whether
    there is one is asked, which takes 30 us, only where numbers were drawn since it was put in.

    Attributes:
        known: its memory when it was put in, with no number waiting; empty: not known.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self._memory = _memory_of(generator)
        self.known = b"" if self._memory is None else bytes(self._memory)
        self._waiting: Any = None

    def put_away(self) -> None:
        if self._memory is None or not self.known or bytes(self._memory) != self.known:
            state = numpy.random.get_state(legacy=False)
            self._waiting = state if state["has_gauss"] else None

    def put_in(self) -> None:
        _RANDOM.set_bit_generator(self.generator)
        self.known = b""
        if self._waiting is not None:
            numpy.random.set_state(self._waiting)
        elif self._memory is not None:
            self.known = bytes(self._memory)


def _memory_of(generator: Any) -> memoryview | None:
    """The state of numpy's usual bit generator; None of another one."""
    if type(generator) is not numpy.random.MT19937:
        return None
    return _seen(generator.ctypes.state_address, 625 * 4)  # 624 words and how many of them are used


def _seen(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class Exchange:
    """Two generators of Python's that give each other their states.

    Args:
        one, other: instances of random.Random.
    """

    def __init__(self, one: random.Random, other: random.Random) -> None:
        self._one: Any = one
        self._other: Any = other
        self._parts = (_state_of(one), _state_of(other)) if _in_memory() else None

    def exchange(self) -> None:
        one, other = self._one, self._other
        if self._parts is None:
            state = one.getstate()
            one.setstate(other.getstate())
            other.setstate(state)
            return
        mine, theirs = self._parts
        kept = bytes(mine)
        mine[:] = theirs
        theirs[:] = kept
        one.gauss_next, other.gauss_next = other.gauss_next, one.gauss_next


def _state_of(one: random.Random) -> memoryview:
    """What a generator of Python's has behind an object's head: 624 words and how many of them are used."""
    head = object.__basicsize__
    return _seen(id(one) + head, _BASE.__basicsize__ - head)


_BASE = random.Random.__mro__[1]  # written in C
_exchanges: bool | None = None


def _in_memory() -> bool:
    """Whether generators can be exchanged as memory here; tried once, on two that nobody uses."""
    global _exchanges
    if _exchanges is None:
        words = (_BASE.__basicsize__ - object.__basicsize__) // 4
        _exchanges = sys.implementation.name == "cpython" and words in (625, 626)
        one, other = random.Random(1), random.Random(2)
        one.gauss(), one.random(), other.random()
        states = one.getstate(), other.getstate()
        Exchange(one, other).exchange()
        _exchanges = _exchanges and (other.getstate(), one.getstate()) == states
    return _exchanges
