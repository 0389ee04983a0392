"""Inputs of every format: each line by its index and number, or the reason why not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from batch_files import write_lines
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import BatchError, RequestError
from jaxserve.offline.lines import MAX_LINE_BYTES, open_lines

RECORDS = [{"prompt": "a"}, {"prompt": "ö\u2028", "n": 2}, {"custom_id": "x", "body": {"n": None}}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


@given(lines=st.lists(st.one_of(st.just(b"  \t\r"), st.binary(max_size=8)), max_size=12))
def test_lines_of_jsonl_are_found_wherever_they_are(directory: Path, lines: list[bytes]):
    lines = [line.replace(b"\n", b"") for line in lines]
    path = directory / "found.jsonl"
    path.write_bytes(b"\n".join(lines))
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not kept:
        with pytest.raises(BatchError, match="no lines"):
            open_lines(path)
        return
    opened = open_lines(path)
    assert [opened.number(index) for index in range(len(opened))] == [number for number, _ in kept]
    for index, (_, line) in enumerate(kept):
        try:
            expected = json.loads(line)
        except ValueError:
            expected = None
        if isinstance(expected, dict):
            assert opened[index] == expected
        else:
            with pytest.raises(RequestError):
                opened[index]


def test_the_digest_is_of_every_byte(tmp_path: Path):
    first = open_lines(write_lines(tmp_path / "a.jsonl", RECORDS))
    again = open_lines(write_lines(tmp_path / "b.jsonl", RECORDS))
    other = open_lines(write_lines(tmp_path / "c.jsonl", [*RECORDS, ""]))
    assert first.digest == again.digest != other.digest


@pytest.mark.parametrize(
    "line", ["{", "[1]", "3", "null", b"\xff\xfe", "[" * 100_000, "9" * 5000, '"text"']
)
def test_what_is_no_object_is_refused_alone(tmp_path: Path, line: str | bytes):
    lines = open_lines(write_lines(tmp_path / "in.jsonl", [RECORDS[0], line, RECORDS[1]]))
    with pytest.raises(RequestError):
        lines[1]
    assert lines[2] == RECORDS[1]


def test_a_line_too_long_is_refused_unread(tmp_path: Path):
    """Also if the first part of it that is read is blank, as all of another line is."""
    blank = " " * (3 << 20)
    long = blank + json.dumps({"prompt": "a" * MAX_LINE_BYTES})
    path = write_lines(tmp_path / "in.jsonl", [RECORDS[0], long, blank, RECORDS[1], long])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    lines = open_lines(path)
    assert [lines.number(index) for index in range(len(lines))] == [1, 2, 4, 5]
    for index, size in ((1, len(long) + 1), (3, len(long))):
        with pytest.raises(RequestError, match=rf"has {size} bytes; at most 8388608 .* Split"):
            lines[index]
    assert [lines[0], lines[2]] == RECORDS[:2]


def test_parquet_has_a_column_for_each_key(tmp_path: Path):
    messages = [{"role": "user", "content": "hi", "name": None}]
    rows = [
        {"custom_id": "a", "prompt": "one", "max_tokens": 4},
        {"custom_id": None, "messages": messages, "max_tokens": None},
        {"custom_id": "c", "url": "/v1/completions", "body": json.dumps({"prompt": "x"})},
    ]
    columns = ("custom_id", "prompt", "messages", "max_tokens", "url", "body")
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    lines = open_lines(tmp_path / "in.parquet")
    expected = [
        rows[0],
        {"messages": [{"role": "user", "content": "hi"}]},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x"}},
    ]
    assert len(lines) == 3
    for index in (2, 0, 1, 1):
        assert lines[index] == expected[index]
        assert lines.number(index) == index + 1


def test_array_record_holds_json(tmp_path: Path):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(tmp_path / "in.array_record"), "group_size:1")
    for record in RECORDS:
        writer.write(json.dumps(record).encode())
    writer.close()
    lines = open_lines(tmp_path / "in.array_record")
    assert [lines[index] for index in range(len(lines))] == RECORDS


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.csv", b"x", "must end in"),
        ("in.jsonl", b"", "no lines"),
        ("in.jsonl", b"\n \n", "no lines"),
        ("in.parquet", b"{}\n", "does not have the format of its suffix"),
        ("in.array_record", b"{}\n", "does not have the format of its suffix"),
    ],
)
def test_files_that_hold_no_lines_are_refused(tmp_path: Path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchError, match=words):
        open_lines(tmp_path / name)


def test_what_is_no_file_is_refused(tmp_path: Path):
    for name in ("missing.jsonl", "directory.jsonl"):
        (tmp_path / "directory.jsonl").mkdir(exist_ok=True)
        with pytest.raises(BatchError, match="does not exist or is not a file"):
            open_lines(tmp_path / name)
