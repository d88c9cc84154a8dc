"""When two ranks' lines say the same: equal but for the rank that wrote them, or for when and how fast.

Only what surely is a rank or a time counts. A loss of 0.3 and one of 0.0 are two things, also on rank 3.
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


# Words behind which a number is a rank, also where it would not be one by itself ("rank3", "rank 3.").
_NAMED = re.compile(r"(?i:(?<![^\W_])(?:rank|gpu|cuda|xpu|npu|worker|proc(?:ess)?|device)s?[ :=_#\[(-]{0,3})$")
_THOUSANDS = re.compile(r",\d{3}(?!\d)")
_DECIMALS = re.compile(r"\.\d")


def own_numbers(text: str, rank: int) -> list[int]:
    """Where a rank's number stands for itself: `rank 3`, `cuda:3`, `[3/8]`; never inside 0.3, 3e-4, 1,003, and
    neither in 3. (a float), -3 nor 3%.
    """
    number, found = str(rank), []
    start = text.find(number)
    while start >= 0:
        end = start + len(number)
        after = text[end : end + 1]
        if not (after.isalnum() or after in ("_", "%") or (after == "," and _THOUSANDS.match(text, end))):
            before = text[start - 1] if start else ""
            alone = not (before and (before.isalnum() or before in "_.+-")) and after != "."
            if alone and before == "," and start > 1 and text[start - 2].isdigit():
                alone = False
            if alone or (_DECIMALS.match(text, end) is None and _NAMED.search(text, max(0, start - 12), start)):
                found.append(start)
        start = text.find(number, end)
    return found


@functools.lru_cache(4096)
def _choices(count: int) -> list[tuple[int, ...]]:
    every = range(count)
    if count <= 3:
        return [choice for size in range(count, 0, -1) for choice in itertools.combinations(every, size)]
    # all, or one, or all but one
    return [tuple(every), *((i,) for i in every), *(tuple(j for j in every if j != i) for i in every)]


def as_if(text: str, rank: int, lead: int) -> list[str]:
    """What the lead rank may have written where this rank wrote `text`: its own number put in the lead rank's place,
    wherever it could mean the rank.

    A number that only happens to be the rank's ("step 3 on rank 3") stays in some of them.
    """
    if len(text) > LONGEST:
        return []
    starts = own_numbers(text, rank)[:50]
    size, other, forms = len(str(rank)), str(lead), []
    for choice in _choices(len(starts)) if starts else ():
        parts, at = [], 0
        for index in choice:
            parts += [text[at : starts[index]], other]
            at = starts[index] + size
        forms.append("".join(parts) + text[at:])
    return forms


def without_rank(text: str, rank: int) -> str:
    """A key with every number that could be this rank taken out: for comparing ranks of which none leads."""
    if len(text) > LONGEST:
        return text
    parts, at, size = [], 0, len(str(rank))
    for start in own_numbers(text, rank):
        parts += [text[at:start], "\x01"]
        at = start + size
    return "".join(parts) + text[at:]


_NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def shape(text: str) -> str:
    """A line without its numbers: `step 1 loss 0.3` has the shape of `step 2 loss 0.1`."""
    return _NUMBERS.sub("#", text) if len(text) <= LONGEST else text
