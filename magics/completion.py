"""TAB behind `%%distributed` and `%distributed`: options, their values, commands, names."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from nbdist.magics.options import FLAGS, PRECISIONS, TAKES, strategies
from nbdist.magics.output import MODES

_MAGICS = ("%%distributed", "%distributed")


class Completer:
    """A matcher of IPython's completer, for both magics.

    Args:
        pulled: names that stay on the ranks, for `%distributed pull`.
    """

    def __init__(self, shell: Any, pulled: Callable[[], list[str]]) -> None:
        self._shell, self._pulled = shell, pulled

    def install(self) -> None:
        self._shell.Completer.custom_matchers.append(self._match)

    def remove(self) -> None:
        self._shell.Completer.custom_matchers.remove(self._match)

    @context_matcher(priority=100)
    def _match(self, context: CompletionContext) -> dict[str, Any]:
        """What may stand at the cursor; alone, for Python's own names have no place there."""
        text = context.line_with_cursor[: context.cursor_position]
        try:
            words = shlex.split(text)
        except ValueError:
            words = text.split()
        if len(words) < 1 + (not text[-1:].isspace()) or words[0] not in _MAGICS:
            return {"completions": []}
        last = "" if text[-1:].isspace() else words.pop()
        found = self.complete_here(words, last)
        return {
            "completions": [SimpleCompletion(text=word, type="magic") for word in found],
            "matched_fragment": last,
            "ordered": True,
            "suppress": bool(found),
        }

    def complete_here(self, words: list[str], last: str) -> list[str]:
        magic, *given = words
        if magic == "%distributed":
            if not given:
                from nbdist.magics.commands import COMMANDS

                return self._starting(COMMANDS, last)
            if given[0] == "pull":
                pulled = self._starting(self._pulled(), last)
                return pulled or self._starting(self._names(), last)  # what is here may have changed there
            if given[0] != "on":
                return []
            given = given[1:]
        before, equals, value = last.partition("=")
        if equals:
            return [f"{before}={found}" for found in self._values(before, value)]
        if given and given[-1] in TAKES and given[-1] not in FLAGS:
            return self._values(given[-1], last)
        used = {word.partition("=")[0] for word in given} - {"--env"}
        return self._starting([option for option in TAKES if option not in used], last)

    def _values(self, option: str, start: str) -> list[str]:
        if option == "--output":
            return self._starting(MODES, start)
        if option == "--mixed-precision":
            return self._starting(PRECISIONS, start)
        if option == "--backend":
            return self._starting(strategies(), start)
        if option == "--return":
            done, comma, part = start.rpartition(",")
            return [done + comma + name for name in self._starting(self._names(), part)]
        return []

    def _names(self) -> list[str]:
        """The user's own, in the notebook."""
        hidden = self._shell.user_ns_hidden
        names = [name for name in self._shell.user_ns if not name.startswith("_") and name.isidentifier()]
        return [name for name in names if name not in hidden]

    @staticmethod
    def _starting(words: Iterable[str], start: str) -> list[str]:
        return [word for word in words if word.startswith(start)]
