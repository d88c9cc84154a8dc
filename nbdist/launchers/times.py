"""Times in a line of output that say when it was written or how fast the loop runs, and which two of them are one.

Anything else that looks like a time is data: a date, a `timeout=3s`, a clip of `3 s`.
"""

from __future__ import annotations

import datetime
import re
from typing import NamedTuple

WRITTEN = 60.0  # seconds between the times at which two ranks write the same line, at most
FACTOR = 2.0  # between how long, or how fast, they are at the same; beyond it one of them is a straggler
MOMENT = 1.0  # seconds that a shorter duration may differ by all the same


class Time(NamedTuple):
    start: int
    end: int
    kind: str
    text: str


# Whatever begins with a digit; what is a time must start there, so that a line is walked through once.
_TOKEN = re.compile(r"\d[\w.,]*")
_NUMBER = r"\d[\d,_]*+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_CLOCK = r"(?:\d+:)?\d+:\d\d"
_UNITS = {
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "µs", "μs", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_UNIT = f"(?:{'|'.join(sorted(_UNITS, key=len, reverse=True))})"
_STEP = r"(?:it|iter|iteration|step|batch|epoch|sample|example|image|img|token|row|call|request|req|frame|seq|record)"
_TIME = re.compile(
    "|".join(
        (
            rf"(?P<progress>(?<=\[){_CLOCK}<(?:{_CLOCK}|\?)(?:, *[\d.?]+ ?\w*/\w+)?"  # tqdm: [00:05<00:10, 98.1it/s]
            rf"|(?<=\[){_CLOCK}, *[\d.?]+ ?\w*/\w+"  # ... of an unknown length
            r"|(?<=% )\d+:\d\d:\d\d(?![\w:])"  # rich
            r"|\d+m?s \d+[mu]?s/(?:step|epoch)\b)",  # Keras
            rf"(?P<rate>{_NUMBER} ?(?:(?:s|ms|us|µs|μs|sec)/{_STEP}\b"
            rf"|(?:[kKM]?(?:{_STEP}(?:e?s)?|tok|ex)|[KMGT]?i?B|[KMG]b|bytes)"
            r"(?:/s(?:ec(?:ond)?)?\b| per sec(?:ond)?\b)))",
            rf"(?P<loop>{_NUMBER} ?{_UNIT} ± {_NUMBER} ?{_UNIT} per loop\b)",  # %timeit
            r"(?P<stamp>(?:(?:\d{4}[-/])?\d\d[-/]\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?!\w|:\d))",
        )
    )
)
ADDRESS = re.compile(r"(?<=\bat )0x[0-9a-fA-F]{6,}\b")  # says nothing of a run
# Before a stamp in a log nothing stands but levels, tags and dates: "[rank3]:[W1130 12:25:33", "INFO 12:25:33".
_PREFIX = re.compile(
    r"(?:[\s\[\](){}<>|:;,#*-]|\b[A-Z]{1,8}\b|\b[A-Z]?\d{4}\b|\d{4}[-/]\d\d[-/]\d\d|\b[Rr]ank[ :=_-]{0,2}\d+\b"
    r"|\d{1,3}(?=[\])}>:|]))*"
)
_SPAN = re.compile(rf"{_NUMBER} ?{_UNIT}\b(?:,? (?:and )?\d+(?:\.\d+)? ?{_UNIT}\b|\d+(?:\.\d+)?s\b){{0,3}}(?! ?[=/±])")
_SPAN_CLOCK = re.compile(r"(?:\d+:)?\d+:\d\d(?:\.\d+)?(?![\w:])")
_SPENT = r"(?:took|taken|takes|taking|elapsed|eta|remaining|runtime)"
_OF = (
    r"(?:step|epoch|iter|iteration|batch|train|training|eval|evaluation|wall|total|run|data|load|loading|compute"
    r"|forward|backward|elapsed)"
)
_BEHIND = r"(?:[ _](?:time|about|only|~))?['\"]?[ :=(~≈]{1,3}$"
_ELAPSED = re.compile(
    rf"(?i:(?<![^\W_])(?:{_SPENT}|(?<![-_])(?:in|after)|{_OF}[ _-]?time){_BEHIND}"
    r"|(?:^|[^\w\s])\s*time['\"]?[ :=(~≈]{1,3}$)"
)
_ELAPSED_CLOCK = re.compile(rf"(?i:(?<![^\W_]){_SPENT}{_BEHIND})")
_OF_CPU = re.compile(r"(?:user|sys:|total:) $")  # %time
_PID = re.compile(r"(?i:\bpid)[ =:]{1,2}$")
_WORD = re.compile(r"[^\W\d_]{2}")
_PART = re.compile(rf"({_NUMBER}) ?({_UNIT})")
_FIRST = re.compile(_NUMBER)


def find(text: str) -> list[Time]:
    """The times in a line that may differ between ranks."""
    found, end = [], 0
    for match in _TOKEN.finditer(text):
        start = match.start()
        if start < end or (start and not _may_start(text, start)):
            continue
        kind, end_of_this = _at(text, start)
        if kind:
            end = end_of_this
            found.append(Time(start, end, kind, text[start:end]))
    return found


def _may_start(text: str, start: int) -> bool:
    before = text[start - 1]
    if before == ":":
        return text[start - 2 : start - 1].isalpha()
    return before not in ".,_" and not before.isalnum()


def _at(text: str, start: int) -> tuple[str, int]:
    time = _TIME.match(text, start)
    if time is not None:
        kind, end = str(time.lastgroup), time.end()
        if kind != "stamp" or _is_stamp(text, start, end):
            return kind, end
    first = max(0, start - 32)
    for form, behind in ((_SPAN, _ELAPSED), (_SPAN_CLOCK, _ELAPSED_CLOCK)):
        time = form.match(text, start)
        if time is not None and behind.search(text, first, start) is not None:
            return "span", time.end()
    if text.startswith("CPU times: ") and _OF_CPU.search(text, first, start) is not None:
        time = _SPAN.match(text, start)
        if time is not None:
            return "span", time.end()
    time = ADDRESS.match(text, start) or (_TOKEN.match(text, start) if _PID.search(text, first, start) else None)
    return ("name", time.end()) if time is not None else ("", start)


def _is_stamp(text: str, start: int, end: int) -> bool:
    if start > 64 or _PREFIX.fullmatch(text, 0, start) is None:
        return False
    dated = "-" in text[start : start + 5] or "/" in text[start : start + 5]
    return dated or (int(text[start : start + 2]) < 24 and _WORD.search(text, end) is not None)


def near(mine: Time, theirs: Time) -> bool:
    """Whether two ranks' times, at the same place of a line, tell the same."""
    if mine.kind != theirs.kind:
        return False
    if mine.text == theirs.text or mine.kind in ("progress", "name"):
        return True
    if mine.kind == "stamp":
        both = _moment(mine.text), _moment(theirs.text)
        return None not in both and abs(both[0] - both[1]) <= WRITTEN  # type: ignore[operator]
    if mine.kind == "rate":
        if _FIRST.sub("", mine.text, 1).strip() != _FIRST.sub("", theirs.text, 1).strip():
            return False
        return _within(_number(mine.text), _number(theirs.text))
    a, b = _seconds(mine.text), _seconds(theirs.text)
    return abs(a - b) < MOMENT or _within(a, b)


def _within(a: float, b: float) -> bool:
    return max(a, b) < FACTOR * min(a, b) or a == b


def _number(text: str) -> float:
    number = _FIRST.match(text)
    return float(number[0].replace(",", "").replace("_", "")) if number is not None else 0.0


def _seconds(text: str) -> float:
    """`1min 30s` as 90; of `1 ms ± 2 us per loop` the first."""
    if ":" in text:
        sum_of = 0.0
        for part in text.split(":"):
            sum_of = sum_of * 60 + float(part)
        return sum_of
    parts = _PART.findall(text.partition("±")[0])
    return sum(_number(number) * _UNITS[unit] for number, unit in parts)


def _moment(text: str) -> float | None:
    """Seconds since some day; None when there is no such date."""
    clock = re.search(r"(\d\d):(\d\d):(\d\d)(?:[.,](\d+))?", text)
    assert clock is not None
    day = re.split("[-/]", text[: clock.start()].rstrip(" T")) if clock.start() else []
    try:
        year, month, date = [int(part) for part in ([*day] if len(day) == 3 else [2000, *day] if day else [2000, 1, 1])]
        days = datetime.date(year, month, date).toordinal()
    except ValueError:
        return None
    return days * 86400.0 + int(clock[1]) * 3600 + int(clock[2]) * 60 + int(clock[3]) + float(f"0.{clock[4] or 0}")
