"""A layer trained on a model's own answers: it guesses them, and a run that was stopped goes on."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import exhaustive
from test_medusa_training import OPTIONS, PROMPTS, greedy, random_targets

from jaxserve.cli import main
from jaxserve.core.errors import ConfigError
from jaxserve.models.drafters import eagle
from jaxserve.models.loading.drafters.eagle import EagleCheckpoint
from jaxserve.training.config import TrainingConfig
from jaxserve.training.dense import draft_states, hidden_states
from jaxserve.training.eagle import Layer, loss, train, untrained
from jaxserve.training.targets import windows

__all__ = ["greedy"]  # A fixture.


def test_the_loss_is_that_of_generated_tokens(llama):
    """An untrained layer gives the state that it gets, noise included."""
    rng, key = np.random.default_rng(1), jax.random.key(3)
    tokens = jnp.asarray(rng.integers(3, 256, (2, 9)))
    generated = jnp.arange(9) >= jnp.array([[4], [7]])
    hidden = hidden_states(llama.family, llama.config, llama.params, tokens)
    shapes = eagle.layer_for(llama.config)
    layer = Layer(untrained(shapes, 0))
    arguments = llama.params, hidden, tokens, generated, key
    found = loss(llama.family, llama.config, shapes, layer, *arguments)
    noisy = hidden + jax.random.uniform(key, hidden.shape, minval=-0.1, maxval=0.1)
    each = []
    for row, first in enumerate((4, 7)):
        for place in range(first, 9):
            guess, right = noisy[row, place - 1], hidden[row, place]
            apart = np.abs(guess - right)
            distance = np.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
            logits = llama.family.logits(llama.params, llama.config, jnp.stack([guess, right]))
            cross = -jnp.sum(jax.nn.softmax(logits[1]) * jax.nn.log_softmax(logits[0]))
            each.append(distance + 0.1 * cross)
    assert float(found) == pytest.approx(np.mean(each), rel=1e-4)


def right_guesses(llama, params, targets) -> float:
    """The share of generated tokens after which the layer expects the model's most likely."""
    shapes, heads = eagle.layer_for(llama.config), (llama.params, llama.config)

    @jax.jit
    def right(token_ids):
        hidden = hidden_states(llama.family, llama.config, llama.params, token_ids[None])
        embedded, _ = llama.family.embed(*heads, token_ids, jnp.arange(len(token_ids)))
        expected = draft_states(shapes, params, embedded[None, 1:], hidden[:, :-1])[0]
        guessed, own = (llama.family.logits(*heads, x) for x in (expected, hidden[0, 1:]))
        return guessed.argmax(axis=-1) == own.argmax(axis=-1)

    data = windows(targets, 16)
    found = [np.asarray(right(window.token_ids))[window.generated[1:]] for window in data]
    return float(np.concatenate(found).mean())


@exhaustive
@exhaustive
def test_a_stopped_run_goes_on_to_the_same_layer(llama, tmp_path):
    config = TrainingConfig(
        steps=150, batch_size=2, sequence_length=16, learning_rate=0.02, checkpoint_every=60
    )
    targets, seen = random_targets(llama), []

    def stops(done, total):
        if done == 130:
            raise KeyboardInterrupt

    whole = train(llama.path, targets, tmp_path / "whole", config, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        train(llama.path, targets, tmp_path / "parts", config, stops)
    again = train(
        llama.path, targets, tmp_path / "parts", config, lambda done, _: seen.append(done)
    )
    assert seen == [*range(121, 151)], "it goes on from the checkpoint of step 120"
    assert again.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    before, after = (
        right_guesses(llama, params, targets) for params in (whole.untrained, whole.params)
    )
    assert after > before + 0.3, (before, after, whole.losses)


@exhaustive
@pytest.mark.interfaces
def test_the_command_trains_a_layer_that_guesses_the_answers(greedy, tmp_path, capsys):
    data, out = tmp_path / "prompts.jsonl", tmp_path / "layer"
    # Twice each, so that those held out have been seen: a random model has nothing to generalise.
    lines = [{"prompt": prompt} for prompt in PROMPTS for _ in range(2)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train-speculator", str(greedy), "--method", "eagle", "--data", str(data)]
    assert main([*command, "--out", str(out), *OPTIONS]) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "tokens a step" in line]
    before, after = (float(number) for number in row.split()[-2:])
    assert after > before + 0.3, printed
    assert '"method": "eagle"' in printed.splitlines()[-1]
    assert EagleCheckpoint.open(out).config.hidden_size == 64


def test_a_model_of_latents_is_refused(llama):
    class Latents:
        mla, architecture = object(), "DeepseekV2ForCausalLM"

    with pytest.raises(ConfigError, match="DeepseekV2ForCausalLM keeps latents"):
        eagle.layer_for(Latents)
