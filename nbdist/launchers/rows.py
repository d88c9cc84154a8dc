"""Text with carriage returns and a cursor that moves, as the lines that a terminal would show in the end."""

from __future__ import annotations

import hashlib
import re

from nbdist.launchers import alike

LONG_ROW = 1 << 16  # letters after which a line without an end is no more than compared ...
KEPT = 4 << 20  # ... and so many of it are kept
MOST_ROWS = 50  # that the cursor may go back up

_CONTROL = re.compile(r"\n|\r|\b|\x08|\x1b\[[0-9;?]*[A-Za-z]|\x1b[@-Z\\^_]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SIMPLE = re.compile(r"[\r\x08\x1b]")


class _LongRow:
    """A line that is too long to be kept whole, or to be edited: digested as it comes."""

    def __init__(self, text: str) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._pieces: list[str] = []
        self._kept = self._size = self._letters = 0
        self.add(text)

    def add(self, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self._digest.update(raw)
        self._size += len(raw)
        self._letters += len(text)
        if self._kept < KEPT and text:
            self._pieces.append(text[: KEPT - self._kept])
            self._kept += len(self._pieces[-1])

    def line(self) -> alike.Long:
        more = self._letters - self._kept
        kept = "".join(self._pieces) + (f" ... ({more:,} more letters of this line)" if more else "")
        return alike.Long.of(kept, alike.key_of_long(self._size, self._digest.hexdigest()))


class Rows:
    """Feed it pieces of text; it gives the lines that are over.

    A line is over at its newline. Once the cursor has gone up in this stream (bars below bars), as many lines as it
    went up stay open until the end.
    """

    def __init__(self) -> None:
        self._rows = [""]
        self._row = self._column = 0
        self._depth = 0
        self._long: _LongRow | None = None
        self._rest = ""  # of an escape sequence that was cut by a read
        self.moved = False  # carriage returns were used: a progress bar

    def feed(self, text: str) -> list[str]:
        """The lines that this text ends."""
        if self._long is not None:
            first, newline, text = text.partition("\n")
            self._long.add(first)
            if not newline:
                return []
            line, self._long = self._long.line(), None
            return [line, *self.feed(text)]
        text = self._rest + text
        self._rest = ""
        over = self._fed(text)
        if len(self._rows) == 1 and len(self._rows[0]) > LONG_ROW and not self._depth:
            self._long = _LongRow(self._rows[0] + self._rest)
            self._rows, self._column, self._rest = [""], 0, ""
        return over

    def _fed(self, text: str) -> list[str]:
        if not self._depth and _SIMPLE.search(text) is None:
            return self._plain(text)
        escape = text.rfind("\x1b", -64)
        if escape >= 0 and _CONTROL.match(text, escape) is None:
            text, self._rest = text[:escape], text[escape:]
        at = 0
        for match in _CONTROL.finditer(text):
            self._write(text[at : match.start()])
            self._control(match[0])
            at = match.end()
        self._write(text[at:])
        return self._over()

    def rest(self) -> list[str]:
        """What is left when no more comes: the open lines; the last one is left out when it is empty."""
        rows: list[str] = self._rows if self._long is None else [self._long.line()]
        self._long = None
        self._rows, self._row, self._column, self._rest = [""], 0, 0, ""
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def open(self) -> list[str]:
        """The lines that may still change, as they are now."""
        if self._long is not None:
            return [self._long.line()]
        return self._rows if self._rows != [""] else []

    def _plain(self, text: str) -> list[str]:
        row = self._rows[0]
        first, newline, more = text.partition("\n")
        if self._column == len(row) or "\x1b" in row:
            row += first
        else:
            row = row[: self._column] + first + row[self._column + len(first) :]
        if not newline:
            self._rows[0], self._column = row, self._column + len(first)
            return []
        *whole, last = more.split("\n")
        self._rows[0], self._column = last, len(last)
        return [row, *whole]

    def _write(self, text: str) -> None:
        if not text:
            return
        row, at = self._rows[self._row], self._column
        if at >= len(row):
            self._rows[self._row] = row + " " * (at - len(row)) + text
        elif "\x1b" in row or "\x1b" in text:
            self._rows[self._row] = row[:at] + text  # columns cannot be told where there are colours
        else:
            self._rows[self._row] = row[:at] + text + row[at + len(text) :]
        self._column = at + len(text)

    def _control(self, code: str) -> None:
        if code == "\n":
            self._row += 1
            self._column = 0
            if self._row == len(self._rows):
                self._rows.append("")
        elif code == "\r":
            self._column, self.moved = 0, True
        elif code == "\x08":
            self._column = max(0, self._column - 1)
        elif code.startswith("\x1b["):
            self._sequence(code[2:-1], code[-1])

    def _sequence(self, numbers: str, kind: str) -> None:
        if kind == "m":  # a colour: part of the text
            self._write(f"\x1b[{numbers}m")
            return
        count = int(numbers) if numbers.isdigit() else 0
        row = self._rows[self._row]
        if kind == "A":
            up = min(max(1, count), self._row, MOST_ROWS)
            self._row -= up
            self._depth = max(self._depth, up)
            self.moved = True
        elif kind == "K":
            self._rows[self._row] = "" if count == 2 else (row[: self._column] if count == 0 else row)
            if count == 2:
                self._column = 0
        elif kind == "G":
            self._column = max(0, count - 1)
        elif kind == "J" and count == 0:
            self._rows[self._row] = row[: self._column]
            del self._rows[self._row + 1 :]

    def _over(self) -> list[str]:
        keep = self._depth + 1
        over = self._rows[: max(0, min(len(self._rows) - keep, self._row))]
        if over:
            del self._rows[: len(over)]
            self._row -= len(over)
        return over
