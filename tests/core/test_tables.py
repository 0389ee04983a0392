"""Tables as text: aligned, whole in a pipe, and as Markdown."""

from __future__ import annotations

import subprocess
import sys

from jaxserve.core.process.tables import table


def test_the_first_column_is_left_aligned_the_others_right():
    assert table([("requests", "12"), ("of them", "1,000"), ("日本", "")]).split("\n") == [
        "requests     12",
        "of them   1,000",
        "日本",
    ]


def test_cells_are_no_markup():
    assert table([("[bold]x[/bold]", ":smile:")]) == "[bold]x[/bold]  :smile:"


def test_no_line_is_cut_or_coloured_in_a_pipe():
    """Whatever a terminal's width, and where colours are forced."""
    rows = [("name " * 60 + "end", "1"), ("b", "9" * 200)]
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from jaxserve.core.process.tables import table; print(table({rows!r}))",
        ],
        env={"COLUMNS": "20", "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = run.stdout.splitlines()
    assert (len(first), len(second)) == (303 + 2 + 200, 303 + 2 + 200)
    assert first.startswith(rows[0][0]) and second.split() == list(rows[1])


def test_markdown_has_its_alignment():
    assert table([("what", "us"), ("one", "7"), ("", "1,000")], markdown=True).split("\n") == [
        "| what |    us |",
        "|------|------:|",
        "| one  |     7 |",
        "|      | 1,000 |",
    ]
