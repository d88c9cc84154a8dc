"""The options of `%%distributed`, and what is said when one is wrong."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbdist.config.detect import TAKES_GPUS, parse_gpus
from nbdist.config.gpus import CHOOSES
from nbdist.kwargs import PRECISION_VARIABLE, STRATEGY_NAMES, STRATEGY_VARIABLE, PrecisionType
from nbdist.launchers.request import RETURN_LIMIT
from nbdist.magics.output import MODES
from nbdist.registry import STRATEGY_GROUP, Registry

PRECISIONS = tuple(kind.value for kind in PrecisionType if kind is not PrecisionType.FP8)  # which comes later
TAKES = {
    "-n": "a number of ranks",
    "--gpus": TAKES_GPUS,
    "--cpus": "a number of ranks on the CPU",
    "--ranks": "the ranks that run this cell, like 0,2-3",
    "--return": "the names that may come back, like model,losses",
    "--no-return": "nothing: no name comes back",
    "--return-limit": "how much may come back, like 500MB or 16GiB",
    "--output": f"one of {', '.join(MODES)}",
    "--mixed-precision": f"one of {', '.join(PRECISIONS)}",
    "--backend": f"one of {', '.join(STRATEGY_NAMES)}",
    "--fresh": "nothing: new ranks are started",
    "--timeout": "seconds after which the cell is stopped",
    "--env": "a variable for this cell, like NAME=VALUE; may be given again",
}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FLAGS = {"--no-return", "--fresh"}


class OptionError(ValueError):
    """A wrong option: the message names it, what it takes, and the closest right one."""


@dataclass
class Options:
    """Defaults are what a cell without options gets."""

    n: int | None = None
    gpus: int | tuple[int, ...] | None = None
    cpus: int | None = None
    ranks: str | None = None
    only: frozenset[str] | None = None
    limit: int = RETURN_LIMIT
    output: str = "merged"
    fresh: bool = False
    timeout: float | None = None
    env: dict[str, str] = field(default_factory=dict)

    def running(self, size: int) -> tuple[int, ...] | None:
        """The ranks of a pool of this size that run the cell; None for all."""
        return None if self.ranks is None else parse_ranks(self.ranks, size)


def parse(line: str) -> Options:
    """The options on the magic's line.

    Raises:
        OptionError: with the way out.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise OptionError(f"%%distributed {line.strip()}: {error}") from None
    options, seen = Options(), set()
    words.reverse()
    while words:
        word = words.pop()
        name, given, value = word.partition("=")
        if name == "--env" and not given:
            pass
        elif name.startswith("-n") and not name.startswith("--") and name[2:].isdigit():  # -n4
            name, given, value = "-n", "=", name[2:]
        if name not in TAKES:
            raise OptionError(_unknown(word))
        if name in seen and name != "--env":
            raise OptionError(f"%%distributed: {name} is given twice")
        seen.add(name)
        if name in FLAGS:
            if given:
                raise OptionError(f"%%distributed {name}: takes {TAKES[name]}")
            value = ""
        elif not given:
            if not words or words[-1] in TAKES:
                raise OptionError(f"%%distributed {name}: takes {TAKES[name]}")
            value = words.pop()
        _set(options, name, value)
    if "--return" in seen and "--no-return" in seen:
        raise OptionError("%%distributed: --return and --no-return exclude each other")
    several = [name for name in ("-n", "--gpus", "--cpus") if name in seen]
    if len(several) > 1:
        raise OptionError(f"%%distributed: {' and '.join(several)} exclude each other: give one of them")
    return options


def _unknown(word: str) -> str:
    name = word.partition("=")[0]
    if word.isdigit():
        return f"%%distributed {word}: did you mean -n {word} ({TAKES['-n']})?"
    if name in ("--help", "-h", "-?", "?"):
        return "`%%distributed?` shows the help. Options: " + "; ".join(
            f"{option}: {takes}" for option, takes in TAKES.items()
        )
    close = difflib.get_close_matches(name, [*TAKES, "--no-return"], n=1, cutoff=0.5)
    if close:
        takes = "" if close[0] in FLAGS else f" ({TAKES[close[0]]})"
        return f"%%distributed {word}: there is no such option; did you mean {close[0]}{takes}?"
    if not word.startswith("-"):
        return f"%%distributed: unexpected {word!r}: only options stand on this line, like -n 4 (the code is below it)"
    return f"%%distributed {word}: there is no such option. There are: {', '.join(TAKES)}; `%%distributed?` tells more"


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"\d+", value) or int(value) < 1:
        raise OptionError(f"%%distributed {name} {value}: takes {TAKES[name]}, 1 or more")
    return int(value)


def _size(name: str, value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]I?B|B)", value.upper())
    if match is None:
        raise OptionError(f"%%distributed {name} {value}: takes {TAKES[name]}")
    return int(float(match[1]) * _UNITS[match[2]])


def _one_of(name: str, value: str, known: Sequence[str]) -> str:
    if value in known:
        return value
    close = difflib.get_close_matches(value, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise OptionError(f"%%distributed {name} {value}: takes {TAKES[name]}{hint}")


def strategies() -> list[str]:
    """Names of strategies: of this package, and those that others have under its entry point."""
    return Registry("strategy", STRATEGY_GROUP, dict.fromkeys(STRATEGY_NAMES, "")).names()


def _set(options: Options, name: str, value: str) -> None:
    if name == "-n":
        options.n = _number(name, value)
    elif name == "--gpus":
        try:
            options.gpus = parse_gpus(value)
        except ValueError as error:
            raise OptionError(f"%%distributed {error}") from None
    elif name == "--cpus":
        options.cpus = _number(name, value)
    elif name == "--ranks":
        options.ranks = value
        parse_ranks(value, None)
    elif name == "--return":
        names = [part.strip() for part in value.split(",") if part.strip()]
        wrong = [part for part in names if not part.isidentifier()]
        if wrong or not names:
            raise OptionError(f"%%distributed --return {value}: takes {TAKES[name]}")
        options.only = frozenset(names)
    elif name == "--no-return":
        options.only = frozenset()
    elif name == "--return-limit":
        options.limit = _size(name, value)
    elif name == "--output":
        options.output = _one_of(name, value, MODES)
    elif name == "--mixed-precision":
        options.env[PRECISION_VARIABLE] = _one_of(name, value.lower(), PRECISIONS)
    elif name == "--backend":
        options.env[STRATEGY_VARIABLE] = _one_of(name, value.lower(), strategies())
    elif name == "--fresh":
        options.fresh = True
    elif name == "--timeout":
        try:
            options.timeout = float(value)
        except ValueError:
            options.timeout = 0.0
        if not 0 < options.timeout < float("inf"):
            raise OptionError(f"%%distributed --timeout {value}: takes {TAKES[name]}")
    elif name == "--env":
        key, given, text = value.partition("=")
        if not given or not key:
            raise OptionError(f"%%distributed --env {value}: takes {TAKES[name]}")
        if key in CHOOSES:
            raise OptionError(
                f"%%distributed --env {value}: a rank has its GPU from its start; choose with --gpus, or set "
                f"os.environ[{key!r}] in an ordinary cell"
            )
        options.env[key] = text


def parse_ranks(text: str, size: int | None) -> tuple[int, ...]:
    """ "0,2-3" as (0, 2, 3); with a size, ranks that the pool does not have are refused."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise OptionError(f"%%distributed --ranks {text}: takes {TAKES['--ranks']}")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if size is not None and max(ranks) >= size:
        raise OptionError(
            f"%%distributed --ranks {text}: these are ranks 0 to {size - 1}; there is no rank {max(ranks)}"
        )
    return tuple(sorted(ranks))
