"""When two ranks' lines say the same: equal but for the rank that wrote them, or for when and how fast.

Only what surely is a rank or a time counts: `rank 3`, never the 3 of `errors: 3`. Where it is not sure, the lines
differ, and both are shown. What is a time, and which two are one, is said in `times`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re

from nbdist.launchers import times

LONGEST = 4096  # characters of a line that are looked into; longer ones are alike when they are equal
_MARK = "\x00"  # stands for a time in a key
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Long(str):
    """What is kept of a line that is too long to be kept whole. `key`: what the whole line is compared by."""

    key: str

    @classmethod
    def of(cls, kept: str, key: str) -> Long:
        line = cls(kept)
        line.key = key
        return line


def key_of_long(size: int, digest: str) -> str:
    """Args: size: bytes of the line in UTF-8; digest: blake2b of them, of 16 bytes."""
    return f"{_MARK}{size} {digest}"


def key(text: str, of_display: bool = False) -> str:
    """A line without its times and colours. Two lines with the same key may be the same but for when they were
    written: `near` says whether they are. Of what is displayed only addresses are taken out.
    """
    if len(text) > LONGEST:
        if isinstance(text, Long):
            return text.key
        raw = text.encode("utf-8", "surrogatepass")
        return key_of_long(len(raw), hashlib.blake2b(raw, digest_size=16).hexdigest())
    if of_display:
        return times.ADDRESS.sub(_MARK, text)
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    text = text.rstrip()
    found = times.find(text)
    if not found:
        return text
    parts, at = [], 0
    for time in found:
        parts += [text[at : time.start], _MARK]
        at = time.end
    return "".join(parts) + text[at:]


@functools.lru_cache(4096)
def near(mine: str, theirs: str) -> bool:
    """Whether two lines of the same key are one: none of their times tells what the other's does not."""
    if mine == theirs or max(len(mine), len(theirs)) > LONGEST:
        return True
    found = _found(mine), _found(theirs)
    return len(found[0]) == len(found[1]) and all(map(times.near, *found))


@functools.lru_cache(4096)
def _found(text: str) -> list[times.Time]:
    return times.find(_COLOURS.sub("", text).rstrip())


def times_of(text: str) -> list[str]:
    return [time.text for time in _found(text)]


# A number is the rank's only where it says who wrote the line, as in these places; anywhere else it may be data.
# Behind a word for a rank, with what may stand before that: "rank3", "local_rank=3", "cuda:3", "GPU #3". Not a plural,
# which is a count, and no other `..._rank`: "matrix_rank=3".
_NAMED = re.compile(
    r"(?i:(?<![^\W_])(?:([^\W\d_]+)([ _-]))?(?:(rank|cuda|xpu|npu|hpu)|gpu|worker|process|proc|device)"
    r"([ _-]?(?:id|idx|index))?['\"]?(?:-|[ :=_#\[(]{0,3}))$"
)
_NAMED_TYPE = re.compile(r"type='(?:cuda|xpu|npu|hpu)', index=$")  # how torch writes a device
_JOINED = frozenset(("local", "global", "world", "my", "this", "current", "node", "dist"))  # local_rank, and not n_gpu
# Before a word for a rank these make it another's, or a count: "best device 3", "missing rank 3", "low rank 3".
_COUNTED = re.compile(
    r"matrix|tensor|lora|low|full|row|column|numerical|effective|num|n|\w+est|worst|more|less|top|root|source|src|dst"
    r"|dest|destination|target|next|prev|previous|last|first|other|peer|missing|failed|dead|lost|free|idle|busy|chosen"
    r"|chose|picked|selected|found|argmax|argmin|max|min|winner|faster|slower|better|worse"
)
# ... and before `device 3` these say where the line was written.
_PLACED = frozenset(("on", "using", "uses", "use", "from", "is", "am", "at", "hello", "hi", "by"))
# A greeting or "I am" before it; "step 5 on". Not other words with "on" or "from": "working on 3", "resumed from 3".
_WHO = re.compile(
    r"(?i:\b(?:(?:hello|hi|hey|greetings|bye|goodbye)(?:,? world)?[,!:]?(?: (?:from|on|this is|i am|i'm))?"
    r"|i am|i'm|(?:step|epoch|batch|iteration) \d+ (?:on|from)) )$"
)
# A line's tag, with words behind it: "3: ready", "[3] ready". A list by itself, "[3]", is none.
_TAG = re.compile(r"\s*(?:\d+ ?[:|>)]|\[\d+\]:?|<\d+>:?) +[^\W\d_]|\s*(?:\[\d+\]|<\d+>):? *[\[<(] *[^\W\d_]")
_TAG_START = re.compile(r"\s*[\[<]?")
_OF_ALL = re.compile(r"/(\d+)[\])]")
# What makes another number of it, or an amount.
_GOES_ON = re.compile(r"\w|[.,:-]\d| ?(?:[%°]|(?:[KMGT]i?)?B\b|bytes?\b)")


def own_numbers(text: str, rank: int, world: int | None = None) -> list[int]:
    """Where a number surely is the rank's own: `rank 3`, `cuda:3`, `[3/8]` of a world of 8, `3: ready`, `hello from 3`.

    Not in `errors: 3`, `step 3`, `x=3`: what may be data is data, and a line that differs in it is shown.
    """
    number, found, tagged = str(rank), [], False
    start = text.find(number)
    while start >= 0:
        end = start + len(number)
        if _GOES_ON.match(text, end) is None and (how := _says_who(text, start, end, world)):
            found.append((start, how))
            tagged = tagged or how == _NAMES
        start = text.find(number, end)
    return [start for start, how in found if how != _MAYBE or not tagged]


# How a number says who wrote the line: it is the rank's name; it is tied to its device; or it may be, where nothing
# else in the line is its name: the device of "rank 1: device 1" may be what was found.
_NAMES, _TIED, _MAYBE, _NO = 3, 2, 1, 0


def _says_who(text: str, start: int, end: int, world: int | None) -> int:
    first = max(0, start - 48)
    named = _NAMED.search(text, first, start)
    if named is not None:
        before, joint = (named[1] or "").lower(), named[2]
        if _COUNTED.fullmatch(before) is not None or (joint not in (None, " ") and before not in _JOINED):
            return _NO
        if (named[3] or "").lower() == "rank":
            return _NAMES
        if named[3] or named[4] or before in _JOINED or before in _PLACED:
            return _TIED
        return _NO if before else _MAYBE
    if start and text[start - 1] in "[(" and (of := _OF_ALL.match(text, end)) is not None:
        return _NAMES if int(of[1]) == world else _NO
    if _NAMED_TYPE.search(text, first, start) is not None:
        return _TIED
    tag_start = _TAG_START.match(text)
    is_tag = tag_start is not None and tag_start.end() == start and _TAG.match(text) is not None
    return _NAMES if is_tag or _WHO.search(text, first, start) is not None else _NO


@functools.lru_cache(4096)
def _choices(count: int) -> list[tuple[int, ...]]:
    every = range(count)
    if count <= 3:
        return [choice for size in range(count, 0, -1) for choice in itertools.combinations(every, size)]
    # all, or one, or all but one
    return [tuple(every), *((i,) for i in every), *(tuple(j for j in every if j != i) for i in every)]


def as_if(text: str, rank: int, lead: int, world: int | None = None) -> list[str]:
    """What the lead rank may have written where this rank wrote `text`: its own number put in the lead rank's place,
    wherever it says who wrote the line.

    Each with some of them, since one may be another's after all ("rank 3 sends to rank 3").
    """
    if len(text) > LONGEST:
        return []
    starts = own_numbers(text, rank, world)[:50]
    size, other, forms = len(str(rank)), str(lead), []
    for choice in _choices(len(starts)) if starts else ():
        parts, at = [], 0
        for index in choice:
            parts += [text[at : starts[index]], other]
            at = starts[index] + size
        forms.append("".join(parts) + text[at:])
    return forms


def without_rank(text: str, rank: int, world: int | None = None) -> str:
    """A key with every number that is this rank's taken out: for comparing ranks of which none leads."""
    if len(text) > LONGEST:
        return text
    parts, at, size = [], 0, len(str(rank))
    for start in own_numbers(text, rank, world):
        parts += [text[at:start], "\x01"]
        at = start + size
    return "".join(parts) + text[at:]


_NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def shape(text: str) -> str:
    """A line without its numbers: `step 1 loss 0.3` has the shape of `step 2 loss 0.1`."""
    return _NUMBERS.sub("#", text) if len(text) <= LONGEST else text
