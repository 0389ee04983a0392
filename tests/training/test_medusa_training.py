"""Heads trained on a model's own answers: they guess them, and a run that was stopped goes on."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from exhaustive import exhaustive

from jaxserve.cli import main
from jaxserve.core.errors import ConfigError
from jaxserve.models.loading.drafters.medusa import MedusaCheckpoint
from jaxserve.training.config import TrainingConfig
from jaxserve.training.dense import hidden_states
from jaxserve.training.medusa import train
from jaxserve.training.targets import Target, read_prompts, windows

PROMPTS = [f"{word} and" for word in ("one", "two", "six", "ten", "red", "sky", "sea", "sun")]
OPTIONS = ["--num-heads", "2", "--max-tokens", "24", "--steps", "150", "--batch-size", "2"]
OPTIONS += ["--sequence-length", "32", "--learning-rate", "0.02", "--checkpoint-every", "20"]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {}),
        ("Gemma2ForCausalLM", {"sliding_window": 5, "attn_logit_softcapping": 20.0}),
        ("GptOssForCausalLM", {"sliding_window": 5}),
    ],
)
def test_whole_sequences_are_computed_as_the_reference_does(architecture, overrides):
    family, config, params = oracle.tiny_model(architecture, **overrides)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (3, 17))
    found = hidden_states(family, config, params, jnp.asarray(tokens))
    for row, sequence in zip(found, tokens):
        logits = family.logits(params, config, row)
        expected = oracle.dense_logits(family, params, config, sequence)
        assert np.asarray(logits) == pytest.approx(expected, abs=1e-3)


def test_windows_have_every_generated_token_once():
    targets = [Target((1, 2, 3), (4, 5, 6, 7)), Target((8,), (9,)), Target((1,) * 9, (2,))]
    found = windows(targets, 4)
    assert [window.token_ids[window.generated].tolist() for window in found] == [
        [4],
        [5, 6, 7],
        [9],
        [2],
    ]
    assert all(window.token_ids.shape == window.generated.shape == (4,) for window in found)


def random_targets(llama):
    rng = np.random.default_rng(4)
    return [Target((5, 6), tuple(map(int, rng.integers(3, 256, 30)))) for _ in range(6)]


@exhaustive
def test_a_stopped_run_goes_on_to_the_same_heads(llama, tmp_path):
    config = TrainingConfig(
        num_heads=2, steps=7, batch_size=2, sequence_length=16, checkpoint_every=2
    )
    targets, seen = random_targets(llama), []

    def stops(done, total):
        seen.append(done)
        if done == 5:
            raise KeyboardInterrupt

    whole = train(llama.path, targets, tmp_path / "whole", config, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        train(llama.path, targets, tmp_path / "parts", config, stops)
    seen.clear()
    again = train(
        llama.path, targets, tmp_path / "parts", config, lambda done, _: seen.append(done)
    )
    assert seen == [5, 6, 7], "it goes on from the checkpoint of step 4"
    assert again.losses == whole.losses
    assert np.array_equal(again.blocks, whole.blocks)
    assert np.abs(whole.blocks).max() > 0


@pytest.fixture
def greedy(llama, tmp_path):
    """The tiny Llama in a directory that has it answer greedily."""
    directory = tmp_path / "greedy"
    directory.mkdir()
    for file in llama.path.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "generation_config.json").write_text('{"do_sample": false}')
    return directory


@pytest.mark.interfaces
def test_the_command_trains_heads_that_guess_the_answers(greedy, tmp_path, capsys):
    data, out = tmp_path / "prompts.jsonl", tmp_path / "heads"
    # Twice each, so that those held out have been seen: a random model has nothing to generalise.
    lines = [{"prompt": prompt} for prompt in PROMPTS for _ in range(2)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train-speculator", str(greedy), "--data", str(data), "--out", str(out)]
    assert main([*command, *OPTIONS]) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "tokens a step" in line]
    untrained, trained = (float(number) for number in row.split()[-2:])
    assert trained > untrained + 0.3, printed
    assert "--speculative-config" in printed.splitlines()[-1]
    assert MedusaCheckpoint.open(out).config.num_heads == 2
    assert (out / "loss.svg").exists()
    assert len((out / "targets.jsonl").read_text().splitlines()) == len(lines)


def test_the_command_goes_on_with_the_same_settings_alone(llama, tmp_path, capsys, monkeypatch):
    def stops(model, prompts, path, *_):
        path.write_text("an answer")
        raise ConfigError("stopped while the model answers.")

    monkeypatch.setattr("jaxserve.training.targets.make_targets", stops)
    data, out = tmp_path / "prompts.jsonl", tmp_path / "heads"

    def error(model=llama.path, data=data, options=OPTIONS) -> str:
        command = ["train-speculator", str(model), "--data", str(data), "--out", str(out)]
        assert main([*command, *options]) == 1
        return capsys.readouterr().err

    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert "absent.jsonl', which cannot be read" in error(data=tmp_path / "absent.jsonl")
    assert "absent" in error(model=tmp_path / "absent")
    assert not out.exists(), "what never began does not stand in the way"
    for _ in range(2):
        assert "stopped while the model answers" in error()
    other = error(options=[*OPTIONS[:-1], "30"])
    assert "--checkpoint-every is 30, but the run in" in other
    data.write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    assert "--data is a file of prompts of SHA-256" in error()


def test_bad_input_is_refused(llama, tmp_path):
    data = tmp_path / "prompts.jsonl"
    for text, message in (
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 of .* has no prompt"),
        ("{\n", "line 1 of"),
        ('{"prompt": "a"}\n', "has 1 prompts; give at least 2"),
    ):
        data.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_prompts(data)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent")
    for changes, message in (
        ({"steps": 0}, "steps is 0; it must be 1 or more"),
        ({"sequence_length": 4}, "sequence_length is 4; heads that guess 3 tokens ahead need 5"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"num_heads": 16}, "num_heads is 16; speculation drafts 15 tokens at most"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainingConfig(**changes)
    with pytest.raises(ConfigError, match="answers fill 12 sequences of 16 tokens, and batch_size"):
        config = TrainingConfig(batch_size=64, sequence_length=16)
        train(llama.path, random_targets(llama), tmp_path, config, lambda *_: None)
