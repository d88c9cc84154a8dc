"""What a rank wrote and displayed, as HTML that stands alone: no script, no stylesheet, only what a notebook's
sanitizer keeps (inline styles, tables, images as data).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from html import escape
from html.parser import HTMLParser
from typing import Any

_SEQUENCE = re.compile(r"\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?")
# Not pure black and white: they must be read on a light page and on a dark one.
_COLOURS = ("#555", "#c62828", "#2e7d32", "#b27500", "#1565c0", "#8e24aa", "#00838f", "#9e9e9e")
_BRIGHT = ("#777", "#ef5350", "#43a047", "#d99a00", "#42a5f5", "#ab47bc", "#26a6b5", "#bdbdbd")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def coloured(text: str) -> str:
    """Text with a terminal's colours as HTML; all else of its escape sequences is left out."""
    if "\x1b" not in text:
        return _escaped(text)
    parts: list[str] = []
    style: dict[str, str] = {}
    at = 0
    for match in _SEQUENCE.finditer(text):
        parts.append(_styled(text[at : match.start()], style))
        if match[0].startswith("\x1b[") and match[0].endswith("m"):
            _change(style, [int(code) if code else 0 for code in match[1].split(";")])
        at = match.end()
    parts.append(_styled(text[at:], style))
    return "".join(parts)


def uncoloured(text: str) -> str:
    return _SEQUENCE.sub("", text) if "\x1b" in text else text


def _escaped(text: str) -> str:
    return escape(_UNPRINTABLE.sub("\ufffd", text), quote=False)


def _styled(text: str, style: dict[str, str]) -> str:
    if not text or not style:
        return _escaped(text)
    told = ";".join(f"{name}:{value}" for name, value in style.items())
    return f'<span style="{told}">{_escaped(text)}</span>'


def _change(style: dict[str, str], codes: list[int]) -> None:
    while codes:
        code = codes.pop(0)
        if code == 0:
            style.clear()
        elif code == 1:
            style["font-weight"] = "bold"
        elif code == 3:
            style["font-style"] = "italic"
        elif code == 4:
            style["text-decoration"] = "underline"
        elif code in (22, 23, 24):
            style.pop({22: "font-weight", 23: "font-style", 24: "text-decoration"}[code], None)
        elif code in (39, 49):
            style.pop("color" if code == 39 else "background-color", None)
        elif code in (38, 48):
            colour, codes[:] = _extended(codes)
            if colour:
                style["color" if code == 38 else "background-color"] = colour
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["color"] = _COLOURS[code - 30] if code < 90 else _BRIGHT[code - 90]
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style["background-color"] = _COLOURS[code - 40] if code < 100 else _BRIGHT[code - 100]


def _extended(codes: list[int]) -> tuple[str, list[int]]:
    """The colour after 38 or 48: 5;n of 256, or 2;r;g;b."""
    if codes[:1] == [2] and len(codes) >= 4:
        return "#" + "".join(f"{min(255, part):02x}" for part in codes[1:4]), codes[4:]
    if codes[:1] != [5] or len(codes) < 2:
        return "", []
    number, rest = codes[1], codes[2:]
    if number < 16:
        return (_COLOURS + _BRIGHT)[number], rest
    if number < 232:
        steps = (0, 95, 135, 175, 215, 255)
        red, green, blue = ((number - 16) // part % 6 for part in (36, 6, 1))
        return f"#{steps[red]:02x}{steps[green]:02x}{steps[blue]:02x}", rest
    grey = min(255, 8 + 10 * (number - 232))
    return f"#{grey:02x}{grey:02x}{grey:02x}", rest


def block(lines: Iterable[str], stream: str = "stdout") -> str:
    """Lines as preformatted text; stderr on a faint ground of its own, as front ends have it.

    An exported page gives `pre` in an output no font of its own, and JupyterLab's is larger than that of streams.
    """
    font = "font-family:monospace;font-size:13px;line-height:1.3;"
    ground = "background-color:rgba(255,0,0,0.1);" if stream == "stderr" else ""
    return f'<pre style="{font}{ground}margin:0;white-space:pre-wrap;">{coloured(chr(10).join(lines))}</pre>'


# ------------------------------------------------------------------ displays

_IMAGES = ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp")


def rich(data: dict[str, Any], metadata: dict[str, Any]) -> str:
    """One display, in the richest form that plain HTML has."""
    if "text/html" in data:
        return f"<div>{balanced(_text(data['text/html']))}</div>"
    for kind in _IMAGES:
        if kind in data:
            return _image(kind, data[kind], metadata.get(kind) or {}, _text(data.get("text/plain", "")))
    if "text/latex" in data:  # front ends typeset what stands between dollars
        return f"<div>{_escaped(_text(data['text/latex']))}</div>"
    if "text/markdown" in data:
        return block([_text(data["text/markdown"])])
    if "application/json" in data and "text/plain" not in data:
        return block([json.dumps(data["application/json"], indent=2, default=str)])
    if "application/json" in data and _text(data["text/plain"]).startswith("<IPython"):
        return block([json.dumps(data["application/json"], indent=2, default=str)])
    return block([_text(data.get("text/plain", ""))])


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _image(kind: str, value: Any, facts: dict[str, Any], told: str) -> str:
    if kind == "image/svg+xml":
        value = _text(value).encode("utf-8", "replace")
    coded = base64.b64encode(value).decode() if isinstance(value, bytes) else re.sub(r"\s", "", _text(value))
    sizes = "".join(f' {name}="{int(facts[name])}"' for name in ("width", "height") if _number(facts.get(name)))
    return f'<img alt="{escape(told)}" src="data:{kind};base64,{coded}"{sizes}>'


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value.isdigit())


_VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"]
)


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("html", "head", "body"):
            return
        self.parts.append(self.get_starttag_text() or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.parts.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.open:
            return
        while True:
            last = self.open.pop()
            self.parts.append(f"</{last}>")
            if last == tag:
                return

    def handle_data(self, data: str) -> None:
        self.parts.append(data if self.cdata_elem else data.replace("<", "&lt;"))

    def handle_entityref(self, name: str) -> None:
        self.parts.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.parts.append(f"&#{name};")


def balanced(html: str) -> str:
    """A piece of HTML that cannot close what it did not open, nor leave open what it did: a table without its end
    would swallow the other ranks' output.
    """
    parser = _Balance()
    parser.feed(html)
    parser.close()
    return "".join(parser.parts) + "".join(f"</{tag}>" for tag in reversed(parser.open))
