"""`jaxserve train-speculator`: train what drafts for a model, on its own answers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from jaxserve.cli.arguments.options import Common
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.tables import table
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.training.config import TrainingConfig

if TYPE_CHECKING:
    from jaxserve.training.acceptance import MeasuredAcceptance

_PROMPTS, _TARGETS = "own_prompts.jsonl", "targets.jsonl"
_HELD_OUT = 8
"""One prompt in so many is not trained on, and measures the heads."""
_MEASURED = 16
"""Most prompts that measure them."""


@dataclasses.dataclass(frozen=True)
class TrainSpeculator(Common):
    """Train heads or a layer that draft for a model, for speculation without a draft model.

    The model answers the prompts, the heads learn to guess its answers, and the drafts accepted
    before and after are printed, on prompts that were held out. Run again after it was stopped, it
    goes on from its last checkpoint.

    Attributes:
        model: a directory, a .gguf file, a Hugging Face id, or the name of the default model.
        data: a JSONL file of prompts: {"prompt": text} or {"messages": [...]} on each line. Without
            one the model writes prompts itself, as users of its chat template would.
        num_prompts: how many it writes; without `data` only.
        out: a directory for the heads, the answers, checkpoints and the plot of the loss.
        method: what is trained: "medusa", one head for each token ahead, or one layer, "eagle" or
            "eagle3".
        max_tokens: maximum number of tokens of an answer.
        temperature: of the answers; by default that of the model's generation_config.json.
    """

    model: Annotated[Positional[str | None], arg(metavar="MODEL")] = None
    data: Path | None = None
    num_prompts: int = 512
    out: Path = Path("heads")
    method: Literal["medusa", "eagle", "eagle3"] = "medusa"
    max_tokens: int = 128
    temperature: float | None = None
    training: OmitArgPrefixes[TrainingConfig] = dataclasses.field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field and its value."""
        if self.num_prompts < 2:
            raise ConfigError(f"num_prompts is {self.num_prompts}; it must be 2 or more.")

    def run(self) -> int:
        from jaxserve.models.drafters.eagle import layer_for
        from jaxserve.models.drafters.eagle3 import default_aux_layers
        from jaxserve.models.loading.checkpoint import open_checkpoint
        from jaxserve.training import eagle, eagle3, medusa
        from jaxserve.training.acceptance import acceptance
        from jaxserve.training.own_prompts import write_prompts
        from jaxserve.training.targets import make_targets, read_prompts

        num_heads = self.training.num_heads
        train = {"medusa": medusa.train, "eagle": eagle.train, "eagle3": eagle3.train}[self.method]
        given = None if self.data is None else read_prompts(self.data)
        model = open_checkpoint(self.model).config
        if self.method != "medusa":
            layer_for(model, self.method)  # Fail now, not after the answers.
        if self.method == "eagle3":
            default_aux_layers(model.num_layers)
        self._check_resumes(json.dumps(given))
        with TerminalProgress() as progress:
            if given is None:
                own = self.out / _PROMPTS
                wrote = functools.partial(progress, "prompts")
                write_prompts(self.model, self.num_prompts, own, wrote)
                given = read_prompts(own)
            targets = make_targets(
                self.model,
                given,
                self.out / _TARGETS,
                self.max_tokens,
                self.temperature,
                functools.partial(progress, "targets"),
            )
            held_out = targets[::_HELD_OUT]
            learnt = [target for i, target in enumerate(targets) if i % _HELD_OUT]
            trained = train(
                self.model,
                learnt,
                self.out / "checkpoints",
                self.training,
                functools.partial(progress, "training"),
            )
        trained.save(self.out)
        self._plot(trained.losses)
        measured = [target.prompt for target in held_out[:_MEASURED]]
        with tempfile.TemporaryDirectory() as untrained:
            trained.save_untrained(Path(untrained))
            before, after = (
                acceptance(self.model, self.method, drafter, num_heads, measured, self.max_tokens)
                for drafter in (Path(untrained), self.out)
            )
        print(_report(before, after))
        drafter = {
            "method": self.method,
            "model": str(self.out),
            "num_speculative_tokens": num_heads,
        }
        print(f"\njaxserve serve {self.model or ''} --speculative-config '{json.dumps(drafter)}'")
        return 0

    def _check_resumes(self, prompts: str) -> None:
        """Raises ConfigError when `out` has answers of a run with other settings or prompts; notes
        those of this, and drops prompts that a model wrote in another."""
        names = ["model", "method", "max_tokens", "temperature"]
        names += ["num_prompts"] if self.data is None else []
        both = {name: getattr(self, name) for name in names}
        both = both | dataclasses.asdict(self.training)
        settings = {name: str(value) for name, value in both.items()}
        digest = hashlib.sha256(prompts.encode()).hexdigest()
        named = f"a file of prompts of SHA-256 {digest}"
        settings["data"] = "None" if self.data is None else named
        file, answers = self.out / "settings.json", self.out / _TARGETS
        other = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if other and answers.exists() and answers.stat().st_size:
            for name, value in settings.items():
                if other.get(name) != value:
                    raise ConfigError(
                        f"{name} is {value}, but the run in {self.out} has {other.get(name)}; give "
                        "the same to go on with it, or another out."
                    )
            return
        self.out.mkdir(parents=True, exist_ok=True)
        if any(other.get(name) != settings.get(name) for name in ("model", "num_prompts")):
            (self.out / _PROMPTS).unlink(missing_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _plot(self, losses: list[float]) -> None:
        """Draws the losses, if matplotlib is installed."""
        if find_spec("matplotlib") is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 2.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(losses) + 1), losses)
        axes.set(xlabel="step", ylabel="loss", title=self.method)
        figure.savefig(self.out / "loss.svg")


def _report(before: MeasuredAcceptance, after: MeasuredAcceptance) -> str:
    rows = [("drafts accepted up to position", "untrained", "trained")]
    for place, shares in enumerate(zip(before.by_position, after.by_position), 1):
        rows.append((str(place), *(f"{share:.1%}" for share in shares)))
    per_step = (f"{each.tokens_per_step:.2f}" for each in (before, after))
    return table([*rows, ("tokens a step", *per_step)])
