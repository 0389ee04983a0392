"""The recorder of terminals: what a screen shows, and the picture in the README."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from terminal_svg import Frame, Screen, write_svg

RECORDING = Path(__file__).parents[1] / "docs" / "images" / "batch-resume.svg"
SVG = "{http://www.w3.org/2000/svg}"


def shown(screen: Screen) -> list[str]:
    return ["".join(cell.text for cell in line).rstrip() for line in screen.lines()]


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        ("one\r\ntwo", ["one", "two", ""]),
        ("long line", ["long l", "ine", ""]),
        ("1\r\n2\r\n3\r\n4", ["2", "3", "4"]),
        ("bar 1\r\x1b[2Kbar 2", ["bar 2", "", ""]),
        ("a\r\nb\r\x1b[1A\x1b[2Kc", ["c", "b", ""]),
        ("ab\bc\x1b[?25l\x1b]0;title\x07", ["ac", "", ""]),
        ("\x1b[1;31mred\x1b[0m", ["red", "", ""]),
    ],
)
def test_what_a_screen_shows(printed, lines):
    """Also when it comes in pieces, which may end within an escape."""
    whole, split = Screen(6, 3), Screen(6, 3)
    whole.feed(printed)
    for letter in printed:
        split.feed(letter)
    assert shown(whole) == shown(split) == lines


def test_colours():
    screen = Screen(8, 1)
    screen.feed("\x1b[31ma\x1b[38;5;196mb\x1b[38;2;1;2;3mc\x1b[38;5;244md\x1b[39me")
    first, *others = [cell.colour for cell in screen.lines()[0][:5]]
    assert first is not None and others == ["#ff0000", "#010203", "#808080", None]


def test_a_picture_has_every_frame(tmp_path):
    screen, frames = Screen(20, 3), []
    for second in range(10):
        screen.feed(f"{random.Random(second).random()} <&>\r\n")
        frames.append(Frame(float(second), screen.lines()))
    write_svg(tmp_path / "a.svg", frames, 20, 3, "<title>")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    lines = {text.get("id"): "".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    (strip,) = [group for group in root.iter(f"{SVG}g") if group.get("id") == "strip"]
    used = [lines[use.get("href").removeprefix("#")] for use in strip]
    expected = [text for frame in frames for text in map(_text, frame.lines) if text]
    assert used == expected


def _text(line) -> str:
    return "".join(cell.text for cell in line).rstrip()


def test_the_recording_is_small_and_of_a_job_that_resumed():
    assert RECORDING.stat().st_size < 200_000
    text = " ".join(ElementTree.parse(RECORDING).getroot().itertext())
    assert "Killed" in text and "lines are already done." in text
