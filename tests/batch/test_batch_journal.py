"""The output as its own journal: whole lines or nothing, by one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from batch_files import answer
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import BatchError
from jaxserve.offline.journal import BatchJournal, Result, in_use, read_results

texts = st.lists(st.text(max_size=6), max_size=6)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "out.jsonl"


@given(texts=texts, more=texts, data=st.data())
def test_a_file_cut_anywhere_goes_on_after_its_last_whole_line(path, texts, more, data):
    results = [answer(number, text) for number, text in enumerate(texts, 1)]
    whole = b"".join(result.text for result in results)
    size = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.sampled_from([b"", b"\0\0\0", b"garbage\n"]))
    path.write_bytes(whole[:size] + tail)
    kept = [result for result in results if whole.index(result.text) + len(result.text) <= size]

    journal = BatchJournal(path)
    assert list(journal.results()) == kept
    added = [answer(number, text) for number, text in enumerate(more, len(results) + 1)]
    journal.append(added)
    journal.close()
    assert list(read_results(path)) == kept + added
    assert path.read_bytes() == b"".join(result.text for result in kept + added)


@given(st.integers(1, 10**12), st.text(max_size=20))
def test_a_line_says_what_it_is_of(number: int, text: str):
    result = answer(number, text)
    assert Result.parse(result.text) == result
    assert result.text.count(b"\n") == 1
    assert all(Result.parse(result.text[:end]) is None for end in range(len(result.text)))


@pytest.mark.parametrize(
    "text", [b"{}\n", b"[]\n", b'{"id":"batch_req_0"}\n', b'{"id":3}\n', b"\n"]
)
def test_what_is_no_result_is_none(text: bytes):
    assert Result.parse(text) is None


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"error": "wrong"},
        {"error": {"message": "wrong"}},
        {"error": {"code": 3, "message": "wrong"}},
        {"error": None, "response": None},
        {"error": None, "response": {"body": {"usage": {"prompt_tokens": 1}}}},
        {"error": None, "response": {"body": {"usage": {"prompt_tokens": 1.5}}}},
    ],
)
def test_an_answer_of_another_shape_is_told_of_and_not_cut_off(path: Path, rest: dict):
    content = answer(1).text + Result.of(2, **rest).text
    path.write_bytes(content)
    journal = BatchJournal(path)
    with pytest.raises(BatchError, match=r"line 2 of .*: batch_req_2 has neither"):
        list(journal.results())
    journal.close()
    assert path.read_bytes() == content


def test_results_are_on_the_disk_soon_also_when_nothing_follows(path: Path, monkeypatch):
    path.unlink(missing_ok=True)
    now, synced, fsync = [1.0], [], os.fsync
    monkeypatch.setattr("jaxserve.offline.journal.time.monotonic", lambda: now[0])
    monkeypatch.setattr("os.fsync", lambda file: synced.append(now[0]) or fsync(file))
    journal = BatchJournal(path)
    for moment in (1.0, 1.5, 2.5, 3.5, 4.5, 9.0, 10.0, 11.0, 12.0):
        now[0] = moment
        if moment in (1.5, 2.5, 9.0):
            journal.append([answer(int(moment))])
        journal.sync_if_due()
    journal.close()
    assert synced == [3.5, 11.0]


def test_damage_before_the_end_is_told_of_and_nothing_is_thrown_away(path: Path):
    content = answer(1).text + b"torn" + answer(2).text + answer(3).text
    path.write_bytes(content)
    journal = BatchJournal(path)
    with pytest.raises(BatchError, match=r"line 2 of .* is damaged"):
        list(journal.results())
    journal.close()
    assert path.read_bytes() == content


def test_one_process_writes(path: Path):
    path.unlink(missing_ok=True)
    assert not in_use(path)
    journal = BatchJournal(path)
    assert in_use(path)
    with pytest.raises(BatchError, match="another process is writing"):
        BatchJournal(path)
    journal.close()
    journal.close()
    assert not in_use(path)
    BatchJournal(path).close()


def test_where_nothing_can_be_written_is_refused(tmp_path: Path):
    with pytest.raises(BatchError, match="cannot be written: No such file or directory"):
        BatchJournal(tmp_path / "missing" / "out.jsonl")
    with pytest.raises(BatchError, match="cannot be written: Is a directory"):
        BatchJournal(tmp_path)


def test_a_full_disk_leaves_whole_lines(path: Path):
    """As a limit on the file's size has it, which cuts a write short before it fails."""
    path.unlink(missing_ok=True)
    script = f"""
import resource
from pathlib import Path
from batch_files import answer
from jaxserve.core.errors import BatchError
from jaxserve.offline.journal import BatchJournal
journal = BatchJournal(Path({str(path)!r}))
journal.append([answer(1), answer(2)])
size = len(answer(1).text + answer(2).text)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
try:
    journal.append([answer(3)])
except BatchError as error:
    print(error)
journal.sync()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert "File too large" in done.stdout, done.stderr
    assert "make room and run the same command again" in done.stdout
    assert [result.number for result in read_results(path)] == [1, 2]
    assert path.read_bytes() == answer(1).text + answer(2).text
