"""lm-eval's own client of OpenAI's interface gives the scores that it gives the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client_inputs import MODEL

pytestmark = [pytest.mark.clients, pytest.mark.peers]
pytest.importorskip("lm_eval")
CLIENT = "lm-eval"

CHOICES = [
    ("The capital of France is", [" Paris", " Rome", " Berlin"]),
    ("Two plus two is", [" four", " five", " seven"]),
    ("The opposite of hot is", [" cold", " warm", " spicy"]),
    ("Fish live in the", [" water", " sky", " desert"]),
    ("Grass is usually", [" green", " purple", " made of gold"]),
]
QUESTIONS = [("1, 2, 3, 4,", " 5"), ("Monday, Tuesday, Wednesday,", " Friday")]
CHOICE_TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{options}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATION_TASK = """
task: generation
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/generation.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [",", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with both tasks and their data."""
    choices = [{"context": context, "options": options} for context, options in CHOICES]
    questions = [{"context": context, "answer": answer} for context, answer in QUESTIONS]
    for name, rows, task in (
        ("choices", choices, CHOICE_TASK),
        ("generation", questions, GENERATION_TASK),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        (tmp_path / f"{name}.yaml").write_text(task.replace("FOLDER", str(tmp_path)))
    return tmp_path


def evaluate(model: str, tasks: Path, arguments: dict[str, Any]):
    """Scores by task, and what was answered to each question: numbers and texts."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments | {"max_length": 512},
        tasks=["choices", "generation"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    scores = {
        "choices": found["results"]["choices"]["acc,none"],
        "generation": found["results"]["generation"]["exact_match,none"],
    }
    samples = {
        name: [sample["resps"] for sample in sorted(of_task, key=lambda s: s["doc_id"])]
        for name, of_task in found["samples"].items()
    }
    return scores, samples


def flat(choices) -> tuple[list[float], list[str]]:
    """Log probabilities of all options of all questions, and whether each is the greedy one."""
    found = [answer for options in choices for (answer,) in options]
    return [float(logprob) for logprob, _ in found], [str(greedy) for _, greedy in found]


def test_scores(url, tasks, smollm2_path):
    """`local-completions`, tokenizer included, gives the scores of `hf`"""
    ours = {"model": MODEL, "base_url": f"{url}/completions"}
    theirs = {"pretrained": str(smollm2_path.parent), "gguf_file": smollm2_path.name}
    theirs |= {"dtype": "float32", "device": "cpu"}
    scores, samples = evaluate("local-completions", tasks, ours)
    expected_scores, expected = evaluate("hf", tasks, theirs)
    assert scores == expected_scores
    assert scores["choices"] >= 0.6
    assert samples["generation"] == expected["generation"]
    logprobs, greedy = flat(samples["choices"])
    their_logprobs, their_greedy = flat(expected["choices"])
    assert logprobs == pytest.approx(their_logprobs, abs=2e-2)
    assert greedy == their_greedy and {"True", "False"} == set(greedy)
