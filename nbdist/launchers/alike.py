"""When two ranks' lines say the same: equal but for the rank that wrote them, or for when and how fast.

Only what surely is a rank or a time counts: `rank 3`, never the 3 of `errors: 3`. Where it is not sure, the lines
differ, and both are shown.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re

LONGEST = 4096  # characters of a line that are looked into; longer ones are alike when they are equal
_MARK = "\x00"  # stands for a time in a key

# Whatever begins with a digit; what is a time among it must start there, so that a line is walked through once.
_TOKEN = re.compile(r"\d[\w.,]*")
_NUMBER = r"\d[\d,_]*+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_CLOCK = r"(?:\d+:)?\d+:\d\d"
_WORDS = r"(?:s|ms|us|µs|μs|ns|h|secs?|seconds?|mins?|minutes?|hours?|hrs?|days?|(?:milli|micro|nano)seconds?)"
_TIME = re.compile(
    "|".join(
        (
            r"\d{4}[-/]\d\d[-/]\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?",  # a date
            r"\d{1,3}:\d\d:\d\d(?:[.,]\d+)?(?![\w:])",  # 12:30:01.5
            r"\d{1,2}:\d\d ?[AaPp][Mm]\b",
            rf"(?<=\[){_CLOCK}<(?:{_CLOCK}|\?)(?:, *[\d.?]+ ?\w*/\w+)?",  # tqdm: [00:05<00:10, 98.1it/s]
            rf"(?<=\[){_CLOCK}, *[\d.?]+ ?\w*/\w+",  # ... of an unknown length
            r"\d+[dh] ?\d+m(?:in)?(?: ?\d+(?:\.\d+)?s)?\b|\d+m(?:in)? ?\d+(?:\.\d+)?s\b",  # 1h 20min
            # 1.2s/it; 98.1it/s, 3.2 MB/s; 0.3 s, 10 min, but in "max 10 min 3" min is no unit
            rf"{_NUMBER} ?(?:(?:s|ms|us|µs|μs|sec)/\w+|\w{{0,12}}(?:/s(?:ec(?:ond)?)?\b| per sec(?:ond)?\b)"
            rf"|{_WORDS}\b(?! ?[=(]|[ :]+-?\d))",
            r"0x[0-9a-fA-F]{6,}\b",  # an address says nothing of a run
        )
    )
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PID = re.compile(r"(?i:\bpid)[ =:]{1,2}$")


def key(text: str) -> str:
    """A line without its times and colours; two lines with the same key are the same but for when they were written."""
    if len(text) > LONGEST:
        raw = text.encode("utf-8", "surrogatepass")
        return f"{_MARK}{len(raw)} {hashlib.blake2b(raw, digest_size=16).hexdigest()}"
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    text = text.rstrip()
    found = times(text)
    if not found:
        return text
    parts, at = [], 0
    for start, end in found:
        parts += [text[at:start], _MARK]
        at = end
    return "".join(parts) + text[at:]


def times(text: str) -> list[tuple[int, int]]:
    """Where the times in a line are."""
    found, end = [], 0
    for match in _TOKEN.finditer(text):
        start = match.start()
        if start < end or (start and (text[start - 1] in ".,:_" or text[start - 1].isalnum())):
            continue
        time = _TIME.match(text, start)
        if time is not None:
            end = time.end()
            found.append((start, end))
        elif _PID.search(text, max(0, start - 6), start):
            end = match.end()
            found.append((start, end))
    return found


def times_of(text: str) -> list[str]:
    return [text[start:end] for start, end in times(text)]


# A number is the rank's only where it says who wrote the line, as in these places; anywhere else it may be data.
# Behind a word for a rank, with what may stand before that: "rank3", "local_rank=3", "cuda:3", "GPU #3". Not a plural,
# which is a count, and no other `..._rank`: "matrix_rank=3".
_NAMED = re.compile(
    r"(?i:(?<![^\W_])(?:([^\W\d_]+)([ _-]))?(?:rank|gpu|cuda|xpu|npu|hpu|worker|process|proc|device)"
    r"(?:[ _-]?(?:id|idx|index))?['\"]?(?:-|[ :=_#\[(]{0,3}))$"
)
_NAMED_TYPE = re.compile(r"type='(?:cuda|xpu|npu|hpu)', index=$")  # how torch writes a device
_JOINED = frozenset(("local", "global", "world", "my", "this", "current", "node", "dist"))  # local_rank, and not n_gpu
_COUNTED = frozenset(("matrix", "tensor", "lora", "low", "full", "row", "column", "numerical", "effective", "num", "n"))
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
    number, found = str(rank), []
    start = text.find(number)
    while start >= 0:
        end = start + len(number)
        if _GOES_ON.match(text, end) is None and _says_who(text, start, end, world):
            found.append(start)
        start = text.find(number, end)
    return found


def _says_who(text: str, start: int, end: int, world: int | None) -> bool:
    first = max(0, start - 48)
    named = _NAMED.search(text, first, start)
    if named is not None:
        before, joint = (named[1] or "").lower(), named[2]
        return before not in _COUNTED and (joint in (None, " ") or before in _JOINED)
    if start and text[start - 1] in "[(" and (of := _OF_ALL.match(text, end)) is not None:
        return int(of[1]) == world
    tag_start = _TAG_START.match(text)
    if tag_start is not None and tag_start.end() == start and _TAG.match(text) is not None:
        return True
    return _WHO.search(text, first, start) is not None or _NAMED_TYPE.search(text, first, start) is not None


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
