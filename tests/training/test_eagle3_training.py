"""A layer of EAGLE-3 trained on a model's own answers: its passes are those of drafting."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_medusa_training import OPTIONS, PROMPTS, random_targets
from tiny_checkpoints import CONFIG, random_tensors, write_hf
from tiny_engines import TinyModel

from jaxserve.cli import main
from jaxserve.core.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.models.drafters import eagle3
from jaxserve.models.drafters.eagle3 import Eagle3Config
from jaxserve.models.loading.drafters.eagle3 import Eagle3Checkpoint
from jaxserve.training.config import TrainingConfig
from jaxserve.training.dense import draft_states, followed_states
from jaxserve.training.eagle import Layer, random_params
from jaxserve.training.eagle3 import frequent, loss, train
from jaxserve.training.loop import Frozen
from jaxserve.training.own_prompts import write_prompts
from jaxserve.training.targets import Target, read_prompts

PASSES = 3


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> TinyModel:
    """A model of as many layers as the layers that are followed need."""
    raw = CONFIG | {"num_hidden_layers": 7}
    return TinyModel.open(write_hf(tmp_path_factory.mktemp("deep"), raw, random_tensors(raw)))


def test_a_pass_follows_the_pass_before_as_drafts_follow_one_another(deep):
    """Every position of every pass alone: what the layer gives for as many drafts in a row, each
    from all entries before it, computed one after another."""
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(3, 256, (2, 9)))
    generated = jnp.arange(9) >= jnp.array([[4], [6]])
    frozen, aux = Frozen(deep.path, (1, 3, 5)), (1, 3, 5)
    hidden, followed = followed_states(frozen.family, frozen.config, frozen.params, tokens, aux)
    shapes, guessable = eagle3.layer_for(frozen.config), np.sort(rng.permutation(256)[:100])
    own = Eagle3Config(aux, len(guessable), mapped=False)
    params = random_params(eagle3.param_specs(shapes, own), 2)
    arrays = jnp.concatenate([hidden, followed], axis=-1), tokens, generated, jax.random.key(0)
    fixed = frozen, shapes, guessable, PASSES
    found = loss(*fixed, Layer(params), frozen.params, *arrays)

    feature_layer = eagle3.feature_layer(shapes, own)
    totals: list[list[float]] = [[] for _ in range(PASSES)]
    for row, first in enumerate((4, 6)):
        embedded, _ = frozen.family.embed(frozen.params, frozen.config, tokens[row], jnp.arange(9))
        features = np.asarray(eagle3.features(params, followed[row]))
        logits = frozen.family.logits(frozen.params, frozen.config, hidden[row])
        target_probs = jax.nn.softmax(logits[:, guessable])
        for start in range(8):
            own_features = features.copy()
            for index in range(PASSES):
                place = start + index
                if place >= 8:
                    break
                given = draft_states(
                    shapes, params, embedded[None, 1:], own_features[None, :-1], feature_layer
                )[0, place]
                if place + 1 >= first:
                    guess = eagle3.draft_logits(shapes.rms_norm_eps, params, given[None])[0]
                    cross = -jnp.sum(target_probs[place + 1] * jax.nn.log_softmax(guess))
                    totals[index].append(float(cross))
                own_features[place + 1] = given
    expected = sum(0.8**index * np.mean(each) for index, each in enumerate(totals))
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_the_most_frequent_tokens_can_be_guessed():
    targets = [Target((9, 9, 4), (7, 7, 7)), Target((4,), (1,))]
    assert frequent(targets, 4, 12).tolist() == [1, 4, 7, 9]
    assert frequent(targets, 6, 12).tolist() == [0, 1, 2, 4, 7, 9]
    assert frequent(targets, 99, 12).tolist() == list(range(12))


def test_a_stopped_run_goes_on_to_the_same_layer(deep, tmp_path):
    config = TrainingConfig(
        num_heads=2,
        draft_vocab_size=200,
        steps=40,
        batch_size=2,
        sequence_length=16,
        learning_rate=0.01,
        checkpoint_every=15,
    )
    targets, seen = random_targets(deep), []

    def stops(done, total):
        if done == 35:
            raise KeyboardInterrupt

    whole = train(deep.path, targets, tmp_path / "whole", config, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        train(deep.path, targets, tmp_path / "parts", config, stops)
    again = train(deep.path, targets, tmp_path / "parts", config, lambda done, _: seen.append(done))
    assert seen == [*range(31, 41)], "it goes on from the checkpoint of step 30"
    assert again.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert whole.losses[-1] < 0.8 * whole.losses[0]
    whole.save(tmp_path / "layer")
    assert Eagle3Checkpoint.open(tmp_path / "layer").own(7).draft_vocab_size == 200


@pytest.mark.interfaces
def test_a_chat_model_writes_prompts_itself(deep, tmp_path):
    """It continues its template where the user's message begins, to the end of text."""
    file, counts = tmp_path / "own" / "prompts.jsonl", []
    with pytest.raises(ConfigError, match="no chat template, so it cannot write prompts itself"):
        write_prompts(deep.path, 4, file, lambda *_: None)
    template = "{% for each in messages %}<{{ each.content }}>{% endfor %}:"
    chat = tmp_path / "chat"
    shutil.copytree(deep.path, chat)
    (chat / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write_prompts(chat, 4, file, lambda done, _: counts.append(done))
    ((first,), *others), written = read_prompts(file), file.read_bytes()
    assert counts[-1] == 4 == len({first["content"], *(one["content"] for (one,) in others)})
    with LLM(chat, max_num_seqs=4) as llm:
        params = llm.default_sampling_params(temperature=1.0, max_tokens=64)
        seeded = [dataclasses.replace(params, seed=seed) for seed in range(32)]
        answers = [output.outputs[0] for output in llm.generate(["<"] * 32, seeded, use_tqdm=False)]
    ended = (answer.text.strip() for answer in answers if answer.finish_reason == "stop")
    assert first["content"] == next(filter(None, ended))
    write_prompts(tmp_path / "absent", 4, file, lambda *_: None)
    assert file.read_bytes() == written


@pytest.mark.interfaces
def test_the_command_trains_a_layer_that_guesses_the_answers(deep, tmp_path, capsys):
    data, out = tmp_path / "prompts.jsonl", tmp_path / "layer"
    # Twice each, so that those held out have been seen: a random model has nothing to generalise.
    lines = [{"prompt": prompt} for prompt in PROMPTS for _ in range(2)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train-speculator", str(deep.path), "--method", "eagle3", "--data", str(data)]
    command += ["--temperature", "0"]
    assert main([*command, "--out", str(out), *OPTIONS]) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "tokens a step" in line]
    before, after = (float(number) for number in row.split()[-2:])
    assert after > before + 0.3, printed
    assert '"method": "eagle3"' in printed.splitlines()[-1]


def test_a_model_of_few_layers_is_refused(llama, tmp_path):
    with pytest.raises(ConfigError, match="needs 6 or more"):
        train(llama.path, random_targets(llama), tmp_path, TrainingConfig(), lambda *_: None)
