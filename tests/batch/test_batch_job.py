"""Whose output a file is, and who is refused it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batch_files import SETTINGS, answer, prompts, write_lines

from jaxserve.core.errors import BatchError
from jaxserve.offline.job import BatchJob, job_file
from jaxserve.offline.shards import Shard


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return write_lines(tmp_path / "in.jsonl", prompts(3)), tmp_path / "out.jsonl"


def test_a_job_goes_on_where_it_was(paths):
    with BatchJob(*paths, SETTINGS) as job:
        created = job.created
        job.append([answer(2, "two")])
        assert not job.finished
    with BatchJob(*paths, SETTINGS) as job:
        assert (job.earlier, job.created) == (1, created)
        assert list(job.left_in(job.window(0))) == [0, 2]
        job.append([answer(1), answer(3)])
        assert job.finished and job.end()
    with BatchJob(*paths, SETTINGS) as job:
        assert job.finished and job.num_left() == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [({"seed": 1}, "seed was 0 and is 1"), ({"dtype": "bfloat16"}, "dtype was 'float32'")],
)
def test_other_settings_are_another_job(paths, change, words):
    BatchJob(*paths, SETTINGS).close()
    with pytest.raises(BatchError, match=words) as caught:
        BatchJob(*paths, SETTINGS | change)
    assert "belongs to another job" in str(caught.value)
    assert "to start over" in str(caught.value)
    BatchJob(*paths, SETTINGS).close()


def test_another_input_is_another_job(paths, tmp_path: Path):
    BatchJob(*paths, SETTINGS).close()
    other = write_lines(tmp_path / "other.jsonl", prompts(4))
    with pytest.raises(BatchError, match=r"of '.*in.jsonl': input was .* lines was 3 and is 4"):
        BatchJob(other, paths[1], SETTINGS)
    copy = write_lines(tmp_path / "copy.jsonl", prompts(3))
    BatchJob(copy, paths[1], SETTINGS).close()


def test_a_file_of_something_else_is_refused_as_it_is(paths):
    paths[1].write_text("my notes\n")
    with pytest.raises(BatchError, match="is not the output of a batch job"):
        BatchJob(*paths, SETTINGS)
    assert paths[1].read_text() == "my notes\n"
    assert not job_file(paths[1]).exists()


def test_parts_of_a_job_that_is_not_written_down_are_refused(paths, tmp_path: Path):
    part = Shard(1, 3).file(paths[1])
    part.write_bytes(answer(2).text)
    for shard in (Shard(), Shard(0, 2), Shard(1, 3)):
        with pytest.raises(BatchError, match=rf"move {part.name} away"):
            BatchJob(*paths, SETTINGS, shard)
    assert sorted(tmp_path.iterdir()) == sorted([paths[0], part]), "refusing leaves nothing behind"
    part.unlink()
    BatchJob(*paths, SETTINGS, Shard(1, 3)).close()


def test_an_answer_to_a_line_that_there_is_not_is_told_of(paths):
    with BatchJob(*paths, SETTINGS) as job:
        job.append([answer(1)])
    with paths[1].open("ab") as file:
        file.write(answer(4).text)
    with pytest.raises(BatchError, match=r"result for line 4, but .*in.jsonl ends with line 3"):
        BatchJob(*paths, SETTINGS)


def test_a_directory_is_no_output(paths, tmp_path: Path):
    directory = tmp_path / "answers"
    directory.mkdir()
    with pytest.raises(BatchError, match="is a directory"):
        BatchJob(paths[0], directory, SETTINGS)
    assert not job_file(directory).exists()


def test_a_kill_while_the_job_was_written_down_loses_nothing(paths):
    job_file(paths[1]).write_bytes(b'{"created": 17')
    with BatchJob(*paths, SETTINGS) as job:
        assert job.created > 17
        assert json.loads(job_file(paths[1]).read_text())["created"] == job.created


def test_what_was_opened_is_closed_again_when_it_is_refused(paths):
    with BatchJob(*paths, SETTINGS), pytest.raises(BatchError, match="another process is writing"):
        BatchJob(*paths, SETTINGS)
    BatchJob(*paths, SETTINGS).close()
