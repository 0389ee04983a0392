"""A terminal's screen, and an animated SVG of its screens. See record_batch.py."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_ESCAPE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07|\x1b[^][()]")
_PAPER, _INK = "#1b1f2a", "#d7dae0"
_COLOURS = ("#5c6370", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d7dae0")
_CUBE = (0, 95, 135, 175, 215, 255)
_WIDTH, _HEIGHT, _SIZE, _EDGE = 8.4, 19, 14, 14
_HOLD_S = 4.0


class Cell(NamedTuple):
    """A character and its colour, None for the terminal's own."""

    text: str = " "
    colour: str | None = None


Line = tuple[Cell, ...]


class Frame(NamedTuple):
    """What the screen showed from a time on, in seconds."""

    at_s: float
    lines: tuple[Line, ...]


class Screen:
    """Text, colours, cursor up and down, and erasing: what progress bars use. Long lines wrap."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._cells = [[Cell()] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._colour: str | None = None
        self._rest = ""

    def feed(self, text: str) -> None:
        text, at = self._rest + text, 0
        self._rest = ""
        while at < len(text):
            if text[at] == "\x1b":
                escape = _ESCAPE.match(text, at)
                if escape is None:  # the rest comes with the next piece
                    self._rest = text[at:]
                    return
                if escape[2]:
                    self._obey(escape[2], escape[1])
                at = escape.end()
            else:
                self._put(text[at])
                at += 1

    def lines(self) -> tuple[Line, ...]:
        return tuple(tuple(row) for row in self._cells)

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._down()
        elif letter == "\b":
            self._column = max(0, self._column - 1)
        elif letter >= " ":
            if self._column == self._columns:
                self._column = 0
                self._down()
            self._cells[self._row][self._column] = Cell(letter, self._colour)
            self._column += 1

    def _down(self) -> None:
        if self._row + 1 < self._rows:
            self._row += 1
        else:
            self._cells = [*self._cells[1:], [Cell()] * self._columns]

    def _obey(self, command: str, given: str) -> None:
        number = int(given) if given.isdigit() else 0
        if command == "A":
            self._row = max(0, self._row - (number or 1))
        elif command == "B":
            self._row = min(self._rows - 1, self._row + (number or 1))
        elif command == "K":
            first = 0 if number == 2 else self._column
            self._cells[self._row][first:] = [Cell()] * (self._columns - first)
        elif command == "m":
            self._colour = _colour(given, self._colour)


def _colour(codes: str, before: str | None) -> str | None:
    """After a sequence of SGR codes; styles other than the colour of text are left out."""
    numbers = [int(code) if code else 0 for code in codes.split(";")]
    match numbers:
        case [*_, 38, 2, red, green, blue]:
            return f"#{red:02x}{green:02x}{blue:02x}"
        case [*_, 38, 5, number]:
            return _indexed(number)
    for number in numbers:
        if number in (0, 39):
            before = None
        elif 30 <= number <= 37 or 90 <= number <= 97:
            before = _COLOURS[number % 10]
    return before


def _indexed(number: int) -> str:
    """A colour of the 256: eight twice, a cube, and greys."""
    if number < 16:
        return _COLOURS[number % 8]
    if number < 232:
        red, rest = divmod(number - 16, 36)
        return "#" + "".join(f"{_CUBE[level]:02x}" for level in (red, *divmod(rest, 6)))
    return "#" + f"{8 + 10 * (number - 232):02x}" * 3


def write_svg(path: Path, frames: Sequence[Frame], columns: int, rows: int, title: str) -> None:
    """One picture that plays the frames for ever, or shows the last where motion is unwanted.

    Each line that differs is drawn once, and each frame lists its lines. The frames are stacked in
    a strip that a style sheet moves behind a window.
    """
    names: dict[Line, str] = {}
    for line in itertools.chain.from_iterable(frame.lines for frame in frames):
        if any(cell.text != " " for cell in line):
            names.setdefault(line, f"l{len(names)}")
    height, width = rows * _HEIGHT + 2 * _EDGE, columns * _WIDTH + 2 * _EDGE
    total_s = frames[-1].at_s + _HOLD_S
    moves = [
        f"{100 * frame.at_s / total_s:.2f}% {{transform: translateY({-number * height}px)}}"
        for number, frame in enumerate(frames)
    ]
    last = -(len(frames) - 1) * height
    strip = [
        f'<use href="#{names[line]}" y="{number * height + row * _HEIGHT}"/>'
        for number, frame in enumerate(frames)
        for row, line in enumerate(frame.lines)
        if line in names
    ]
    defined = [f'<text id="{name}">{_spans(line)}</text>' for line, name in names.items()]
    text = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img" \
aria-label="{html.escape(title)}">
<title>{html.escape(title)}</title>
<style>
text {{ font: {_SIZE}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: {_INK}; white-space: pre }}
#strip {{ animation: play {total_s:.2f}s step-end infinite }}
@keyframes play {{
{chr(10).join(moves)}
100% {{transform: translateY({last}px)}}
}}
@media (prefers-reduced-motion: reduce) {{
  #strip {{ animation: none; transform: translateY({last}px) }}
}}
</style>
<defs>
{chr(10).join(defined)}
</defs>
<rect width="{width:g}" height="{height}" rx="8" fill="{_PAPER}"/>
<g transform="translate({_EDGE} {_EDGE + _SIZE})"><g id="strip">
{chr(10).join(strip)}
</g></g>
</svg>
"""
    path.write_text(text, encoding="utf-8")


def _spans(line: Iterable[Cell]) -> str:
    """A line's text in its colours. Each run has its place, so that no font shifts what follows."""
    parts, column = [], 0
    for colour, cells in itertools.groupby(line, lambda cell: cell.colour):
        run = "".join(cell.text for cell in cells)
        if run.strip():
            fill = "" if colour is None else f' fill="{colour}"'
            place = f'x="{column * _WIDTH:g}" textLength="{len(run.rstrip()) * _WIDTH:g}"'
            parts.append(f"<tspan {place}{fill}>{html.escape(run.rstrip())}</tspan>")
        column += len(run)
    return "".join(parts)
