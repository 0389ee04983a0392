"""Whole jobs on a real engine: the same answers in whatever order, windows, hosts and pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batch_files import answers, errors, prompts, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import BatchError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.chat_settings import ChatSettings
from jaxserve.llm import LLM
from jaxserve.models.loading import directory as model_directory
from jaxserve.offline import run_batch
from jaxserve.offline.custom_ids import seed_of
from jaxserve.offline.job import BatchJob, settings_of
from jaxserve.offline.run import BatchRun
from jaxserve.offline.shards import Shard
from jaxserve.protocol.completions import CompletionRequest, ParsedCompletion
from jaxserve.protocol.model import Model

LINES = prompts(24)


ALONE = Shard()


def job_of(llm: LLM, directory: Path, shard: Shard = ALONE, window_lines: int = 2048) -> BatchJob:
    plan = llm.engine.plan
    return BatchJob(
        directory / "in.jsonl",
        directory / "out.jsonl",
        settings_of(plan.config, plan.checkpoint.fingerprint, llm.engine.tokenizer),
        shard,
        window_lines,
    )


@pytest.fixture(scope="module")
def expected(batch_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The answers of an undisturbed run, which are those of single calls with the same seeds."""
    directory = tmp_path_factory.mktemp("expected")
    run_batch(batch_llm, write_lines(directory / "in.jsonl", LINES), directory / "out.jsonl")
    found = answers(directory / "out.jsonl")
    for number, line in enumerate(LINES, 1):
        params = SamplingParams(
            temperature=line["temperature"],
            max_tokens=line["max_tokens"],
            ignore_eos=True,
            seed=seed_of(line.get("custom_id", f"line-{number}"), 0, 0),
        )
        (alone,) = batch_llm.generate(line["prompt"], params, use_tqdm=False)
        body = found[number]["response"]["body"]
        assert body["choices"][0]["text"] == alone.outputs[0].text
        assert body["usage"] == {
            "prompt_tokens": len(alone.prompt_token_ids),
            "completion_tokens": line["max_tokens"],
            "total_tokens": len(alone.prompt_token_ids) + line["max_tokens"],
        }
    return found


def test_every_line_is_answered_as_if_alone(expected):
    assert sorted(expected) == list(range(1, len(LINES) + 1))
    for number, content in expected.items():
        custom_id = LINES[number - 1].get("custom_id", f"line-{number}")
        assert content["custom_id"] == custom_id
        assert content["error"] is None
        assert content["response"]["status_code"] == 200
        assert content["response"]["request_id"] == content["id"]


def test_templates_of_lines_need_trust(batch_llm, tmp_path):
    """It is a setting of the job, since it changes answers."""
    line = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    write_lines(tmp_path / "in.jsonl", [line | {"chat_template": "{{ messages[0].content }}"}])
    for chat, refused in ((ChatSettings(trust_request_chat_template=True), 0), (None, 1)):
        plan, tokenizer = batch_llm.engine.plan, batch_llm.engine.tokenizer
        used = settings_of(plan.config, plan.checkpoint.fingerprint, tokenizer, (), chat)
        assert used["trust_request_chat_template"] is (not refused)
        with BatchJob(tmp_path / "in.jsonl", tmp_path / f"{refused}.jsonl", used) as job:
            run = BatchRun(job)
            run.run(batch_llm.engine, chat=chat)
            assert run.totals.num_errors == refused


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    hosts=st.integers(1, 3),
    window_lines=st.integers(1, 30),
    stops=st.lists(st.integers(0, 40), max_size=3),
)
def test_windows_hosts_and_interruptions_change_nothing(
    batch_llm, expected, tmp_path_factory, hosts, window_lines, stops
):
    """Hosts one after the other; each run is interrupted after so many steps, and starts again."""
    directory = tmp_path_factory.mktemp("pieces")
    write_lines(directory / "in.jsonl", LINES)

    class Interrupted(Exception):
        pass

    def interrupt_after(steps: int):
        left = [steps]

        def progress(run: BatchRun) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Interrupted

        return progress

    complete = []
    for index in range(hosts):
        for steps in [*stops, 10**9]:
            with job_of(batch_llm, directory, Shard(index, hosts), window_lines) as job:
                run = BatchRun(job)
                try:
                    run.run(batch_llm.engine, progress=interrupt_after(steps))
                except Interrupted:
                    pass
                else:
                    assert run.done == run.num_left
                    complete.append(run.complete)
                    break
    assert complete[-1]
    assert answers(directory / "out.jsonl") == expected


def test_what_is_done_is_not_done_again(batch_llm, tmp_path: Path):
    paths = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    assert run_batch(batch_llm, *paths).done == len(LINES)
    before = paths[1].read_bytes()
    again = run_batch(batch_llm, *paths)
    assert (again.done, again.complete) == (0, True)
    assert paths[1].read_bytes() == before


def test_bad_lines_are_told_of_and_stop_nothing(batch_llm, tmp_path: Path):
    body = {"prompt": "a", "max_tokens": 2}
    bad = {
        "{": "invalid_line",
        "[]": "invalid_line",
        json.dumps({"custom_id": 3, **body}): "invalid_value",
        json.dumps({"custom_id": "good", **body}): "duplicate_custom_id",
        json.dumps({"custom_id": "a"}): "missing_required_parameter",
        json.dumps({"prompt": "a", "messages": []}): "invalid_value",
        json.dumps({"prompt": "a", "wrong": 1}): "unknown_parameter",
        json.dumps({"prompt": "a", "temperature": 9}): "invalid_value",
        json.dumps({"prompt": ""}): "invalid_value",
        json.dumps({"prompt": "a" * (9 << 20)}): "invalid_line",
        json.dumps({"prompt": "a" * (1 << 20)}): "context_length_exceeded",
        json.dumps({"prompt": "a" * 500}): "context_length_exceeded",
        json.dumps({"prompt": ["a", "a" * 500, "b"]}): "context_length_exceeded",
        json.dumps({"prompt": "a", "stream": True}): "invalid_value",
        json.dumps({"prompt": "a", "model": "gpt-4"}): "model_not_found",
        json.dumps({"url": "/v1/embeddings", "body": body}): "invalid_value",
        json.dumps({"url": ["/v1/completions"], "body": body}): "invalid_value",
        json.dumps({"url": "/v1/completions"}): "missing_required_parameter",
        json.dumps({"url": "/v1/completions", "body": 3}): "invalid_value",
        json.dumps({"method": "GET", "url": "/v1/completions", "body": body}): "invalid_value",
        json.dumps({"url": "/v1/completions", "body": body, "n": 2}): "unknown_parameter",
    }
    lines = [{"custom_id": "good", **body}, *bad, {"custom_id": "last", **body}]
    run = run_batch(batch_llm, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    assert errors(tmp_path / "out.jsonl") == dict(enumerate(bad.values(), 2))
    for number in range(2, len(lines)):
        content = found[number]
        assert content["error"]["message"].startswith(f"line {number}: ")
        assert content["response"]["status_code"] in (400, 404)
        assert content["response"]["body"]["error"]["message"] in content["error"]["message"]
    assert (
        found[1]["response"]["status_code"] == found[len(lines)]["response"]["status_code"] == 200
    )
    assert found[5]["custom_id"] == "good" and "used by line 1" in found[5]["error"]["message"]
    assert found[2]["custom_id"] == "line-2"
    assert run.totals.num_errors == len(bad)
    assert run.complete
    assert not run._lines, "no line is kept when it is answered, whatever the answer"


def test_grammars_are_compiled_while_others_run(batch_llm, tmp_path: Path):
    """More of them than are kept compiled, so that each is that of its own line or made again."""
    choices = [[f"{number:03}"] for number in range(80)]
    lines = [
        {"prompt": "a", "max_tokens": 8, "structured_outputs": {"choice": choice}}
        for choice in choices
    ]
    broken = {"prompt": "a", "structured_outputs": {"regex": "("}}
    paths = write_lines(tmp_path / "in.jsonl", [*lines, broken]), tmp_path / "out.jsonl"
    run = run_batch(batch_llm, *paths)
    assert run.complete and not run._lines
    found = answers(paths[1])
    assert list(errors(paths[1])) == [81]
    texts = [found[number]["response"]["body"]["choices"][0]["text"] for number in range(1, 81)]
    assert texts == [choice for (choice,) in choices]


def test_a_mistake_of_ours_stops_one_line(batch_llm, tmp_path: Path, monkeypatch, caplog):
    """One while a line is read, and one while its answer is written."""
    lines = [{"prompt": text, "max_tokens": 2} for text in ("good", "unread", "unwritten", "last")]
    parse_of, response_of = CompletionRequest.parse, ParsedCompletion.response

    def parse(request: CompletionRequest, model: Model) -> ParsedCompletion:
        return 1 // 0 if request.prompt == "unread" else parse_of(request, model)

    def response(parsed: ParsedCompletion, outputs, request_id: str, created: int):
        body = response_of(parsed, outputs, request_id, created)
        return body["missing"] if request_id == "batch_req_3" else body

    monkeypatch.setattr(CompletionRequest, "parse", parse)
    monkeypatch.setattr(ParsedCompletion, "response", response)
    run = run_batch(batch_llm, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert run.complete
    assert errors(tmp_path / "out.jsonl") == {2: "internal_error", 3: "internal_error"}
    assert answers(tmp_path / "out.jsonl")[2]["response"]["status_code"] == 500
    assert "ZeroDivisionError" in caplog.text and "KeyError" in caplog.text


def test_a_line_may_have_several_prompts_and_samples(batch_llm, tmp_path: Path):
    body = {"prompt": ["one", "two", "one"], "n": 2, "max_tokens": 6, "ignore_eos": True}
    seeded = {"custom_id": "seeded", "url": "/v1/completions", "body": body | {"seed": 5}}
    ours = {"custom_id": "ours", "url": "/v1/completions", "body": body}
    lines = write_lines(tmp_path / "in.jsonl", [seeded, ours])
    run_batch(batch_llm, lines, tmp_path / "out.jsonl")
    found = answers(tmp_path / "out.jsonl")
    texts = {
        number: [choice["text"] for choice in found[number]["response"]["body"]["choices"]]
        for number in found
    }
    assert all(len(texts[number]) == 6 for number in texts)
    assert texts[1][0:2] == texts[1][4:6], "a line's own seed is that of each of its prompts"
    assert texts[2][0:2] != texts[2][4:6], "else prompts that are alike are answered differently"


def test_a_write_that_fails_stops_the_job_and_loses_nothing(batch_llm, expected, tmp_path: Path):
    paths = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    with job_of(batch_llm, tmp_path) as job:
        run = BatchRun(job)

        def close_after(run: BatchRun) -> None:
            if run.done > 5:
                job.journal.close()

        with pytest.raises(BatchError, match="can no longer be written"):
            run.run(batch_llm.engine, progress=close_after)
    assert 5 < len(answers(paths[1])) < len(LINES)
    run_batch(batch_llm, *paths)
    assert answers(paths[1]) == expected


def test_the_engine_is_never_left_with_less_than_it_can_run(batch_llm, tmp_path: Path):
    """Also where windows meet: as many sequences wait as can run, until the input ends."""
    write_lines(tmp_path / "in.jsonl", prompts(60, max_tokens=4))
    with job_of(batch_llm, tmp_path, window_lines=7) as job:
        run = BatchRun(job)
        waiting, most = [], batch_llm.engine.plan.config.max_num_seqs

        def progress(run: BatchRun) -> None:
            if run.num_left - run.done > 2 * most:
                scheduler = batch_llm.engine.scheduler
                waiting.append(scheduler.num_waiting + scheduler.num_running)

        run.run(batch_llm.engine, progress=progress)
    assert waiting and min(waiting) >= most


def test_the_weights_are_not_read_again_in_every_step(batch_llm, tmp_path: Path, monkeypatch):
    """To tell them apart from others, which takes longer than some steps."""
    read = []
    fingerprint_of = model_directory.fingerprint_of
    monkeypatch.setattr(
        model_directory,
        "fingerprint_of",
        lambda *files: read.append(files) or fingerprint_of(*files),
    )
    write_lines(tmp_path / "in.jsonl", prompts(12))
    with job_of(batch_llm, tmp_path) as job:
        count = len(read)  # Of the job's settings.
        BatchRun(job).run(batch_llm.engine)
    assert len(read) <= count + 1


def test_times_and_lengths_are_kept(batch_llm, tmp_path: Path):
    write_lines(tmp_path / "in.jsonl", LINES)
    run = run_batch(batch_llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert run.totals.num_output_tokens == sum(line["max_tokens"] for line in LINES)
    last = run.timeline.samples[-1]
    assert (last.prompt_tokens, last.output_tokens) == (
        run.totals.num_prompt_tokens,
        run.totals.num_output_tokens,
    )
    assert len(run.latency_us) == len(LINES) and min(run.latency_us) > 0
    assert 0 < run.cached_share < 1
    assert run.left_s == 0
