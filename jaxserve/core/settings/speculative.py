"""Settings of speculative decoding."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.draft_tree import MAX_TREE_TOKENS, Path, parse_tree

MAX_SPECULATIVE_TOKENS = 15
DEFAULT_NGRAM_SIZE = 4
AUTO_LENGTHS = (0, 1, 3, 7)
"""Drafts of a sequence and step that "auto" chooses from."""
MAX_TOP_K = 10
"""Most guesses of a token in a tree that a layer grows, EAGLE-2's own number."""
_DEPTH = 5


@dataclasses.dataclass(frozen=True)
class DraftMethod:
    """What is known of a method before any of its files is open.

    Attributes:
        keys: its keys of speculative_config that not all methods have.
        trained: what is trained for the model and drafts, for errors; None if nothing is.
        drawn: drafts are drawn from distributions that are known: of prompt lookup from one that
            has a single token.
        has_layers: layers of a model draft, which have pages of KV.
        computed: drafts come from logits, so that one is missing only where those are NaN.
    """

    keys: tuple[str, ...] = ()
    trained: str | None = None
    drawn: bool = False
    has_layers: bool = False
    computed: bool = False


_LAYER = DraftMethod(("model", "top_k", "depth"), "a draft layer", has_layers=True, computed=True)
METHODS = {
    "ngram": DraftMethod(("prompt_lookup_max", "prompt_lookup_min"), drawn=True),
    "draft_model": DraftMethod(("model",), drawn=True, has_layers=True, computed=True),
    "layer_skip": DraftMethod(("num_layers",), drawn=True, has_layers=True, computed=True),
    "medusa": DraftMethod(("model", "speculative_token_tree"), "heads", drawn=True, computed=True),
    "eagle": _LAYER,
    "eagle3": _LAYER,
    "mtp": DraftMethod(has_layers=True, computed=True),
    "jacobi": DraftMethod(),
    "lookahead": DraftMethod(("max_ngram_size",)),
}


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, with vLLM's names.

    Attributes:
        num_speculative_tokens: tokens drafted for each sequence and step; "auto" chooses from
            AUTO_LENGTHS by measured step times and acceptance. With a tree, its drafts, which is
            the default.
        method: "ngram" drafts what followed the last tokens where they occurred before, in the
            prompt or in the output (prompt lookup); "draft_model" a smaller model of the same
            vocabulary; "layer_skip" the first layers of the model and its head; "medusa" heads
            trained for the model; "eagle" and "eagle3" a layer trained for it; "mtp" the model's
            own layer for further tokens; "jacobi" what the model itself sampled after the last
            step's drafts; "lookahead" n-grams of what it sampled there. By default "draft_model" if
            there is a `model`, else "ngram".
        model: the draft model, as the engine's `model`; for "medusa", "eagle" and "eagle3" the
            directory of the heads or of the layer.
        num_layers: how many layers draft; for "layer_skip" only.
        prompt_lookup_max: most tokens that must occur before for a match; longer matches win.
        prompt_lookup_min: fewest.
        speculative_token_tree: several guesses of the same token, as the paths of a tree
            (`draft_tree.parse_tree`); for "medusa". None: one guess after another.
        top_k: for "eagle" and "eagle3": how many guesses of each token a tree may have, whose shape
            follows from how sure the layer is. None: one guess after another.
        depth: drafts of its longest paths; 5 by default, or as many as there are drafts.
        max_ngram_size: tokens of an n-gram, the one that it is found by included; for "lookahead"
            only, where it is DEFAULT_NGRAM_SIZE by default, or one more than the most drafts.
        acceptance: how drafts are accepted. "exact": where they equal the token sampled in their
            place, so that the tokens are those without drafts. "rejection": with the chance that
            gives the tokens their distribution (Leviathan et al. 2023). "typical": where the model
            finds them likely enough (Medusa, Cai et al. 2024), which promises neither.
        posterior_threshold: for "typical": the probability with which any draft is accepted.
        posterior_alpha: for "typical": with entropy H (nats) a draft of probability above
            posterior_alpha * exp(-H) is accepted too.
    """

    num_speculative_tokens: int | Literal["auto"] | None = None
    method: str | None = None
    model: str | None = None
    num_layers: int | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    speculative_token_tree: tuple[Path, ...] | None = None
    top_k: int | None = None
    depth: int | None = None
    max_ngram_size: int | None = None
    acceptance: Literal["exact", "rejection", "typical"] = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field, its value and the range."""
        if self.method is None:
            method = "ngram" if self.model is None else "draft_model"
            object.__setattr__(self, "method", method)
        if self.method not in METHODS:
            raise ConfigError(
                f"method of speculative_config is {self.method!r}; it must be one of "
                f"{', '.join(METHODS)}."
            )
        self._check_keys()
        if self.model is not None:
            object.__setattr__(self, "model", str(self.model))
        if self.speculative_token_tree is not None:
            self._resolve_tree()
        elif self.num_speculative_tokens is None:
            raise ConfigError(
                'speculative_config has no num_speculative_tokens; give a number, or "auto".'
            )
        if self.top_k is not None or self.depth is not None:
            self._resolve_grown_tree()
        free = self.num_speculative_tokens == "auto" or self.tree_depth
        for name, most in (
            *(() if free else (("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),)),
            *((("num_layers", None),) if self.method == "layer_skip" else ()),
            ("prompt_lookup_max", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_min", self.prompt_lookup_max),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (most is not None and value > most):
                must = "of 1 or more" if most is None else f"in 1..{most}"
                must += ', or "auto"' if name == "num_speculative_tokens" else ""
                raise ConfigError(
                    f"{name} of speculative_config is {value!r}; it must be an integer {must}."
                )
        if self.method == "lookahead":
            self._check_ngram_size()
        self._check_acceptance()

    def _check_acceptance(self) -> None:
        """Raises ConfigError for a rule that there is not, or not with these drafts."""
        if self.acceptance not in ("exact", "rejection", "typical"):
            raise ConfigError(
                f"acceptance of speculative_config is {self.acceptance!r}; it must be exact, "
                "rejection or typical."
            )
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise ConfigError(
                    f"{name} of speculative_config is {value!r}; it must be a number in 0..1."
                )
            if self.acceptance != "typical" and value != getattr(type(self), name):
                raise ConfigError(
                    f"{name} of speculative_config is {value!r}, but acceptance is "
                    f'{self.acceptance!r}; set acceptance to "typical", or leave {name} out.'
                )
        if self.acceptance == "typical" and self.tree_depth:
            raise ConfigError(
                'acceptance of speculative_config is "typical", which accepts drafts one after '
                "another, but the drafts are a tree; leave out the tree, or set another."
            )
        if self.acceptance == "rejection" and not METHODS[self.method].drawn:
            drawn = [method for method, each in METHODS.items() if each.drawn]
            raise ConfigError(
                'acceptance of speculative_config is "rejection", which needs the probability that '
                f"each draft was drawn with; there is none with the method {self.method!r}. Use "
                f'{" or ".join(drawn)}, or set "exact".'
            )
        if self.acceptance == "rejection" and self.speculative_token_tree is not None:
            for path in self.speculative_token_tree:
                before = *path[:-1], path[-1] - 1
                if path[-1] and before not in self.speculative_token_tree:
                    raise ConfigError(
                        f"speculative_token_tree of speculative_config has the path {list(path)} "
                        f"and not {list(before)}, the better guess before it, which the acceptance "
                        '"rejection" tries first; add that one, or set "exact".'
                    )

    @property
    def keeps_probabilities(self) -> bool:
        """Whether the distributions that drafts are drawn from are kept for their acceptance."""
        return self.acceptance == "rejection" and self.method != "ngram"

    def _check_ngram_size(self) -> None:
        """Sets its default. Raises ConfigError for n-grams that no draft, or not all, could be."""
        most, size = 1 + self.lengths[-1], self.max_ngram_size
        if size is None:
            object.__setattr__(self, "max_ngram_size", min(DEFAULT_NGRAM_SIZE, most))
        elif type(size) is not int or not 2 <= size <= most:
            raise ConfigError(
                f"max_ngram_size of speculative_config is {size!r}; it must be an integer in "
                f"2..{most}, the token that an n-gram is found by and at most "
                f"num_speculative_tokens drafts."
            )

    def _check_keys(self) -> None:
        """Raises ConfigError for a key of another method, or without one that the method needs."""
        if self.method == "draft_model" and not self.model:
            raise ConfigError(
                'speculative_config has the method "draft_model" and no model; give the path or '
                "name of a smaller model of the same vocabulary."
            )
        trained = METHODS[self.method].trained
        if trained and not self.model:
            raise ConfigError(
                f'speculative_config has the method "{self.method}" and no model; give the '
                f"directory of {trained} that `jaxserve train-speculator --method "
                f"{self.method}` wrote."
            )
        for field in dataclasses.fields(self):
            methods = [method for method, each in METHODS.items() if field.name in each.keys]
            value = getattr(self, field.name)
            if methods and self.method not in methods and value != field.default:
                raise ConfigError(
                    f"{field.name} of speculative_config is {value!r}, but the method is "
                    f"{self.method!r}; it is a key of {' and '.join(map(repr, methods))} only."
                )

    def _resolve_tree(self) -> None:
        """Raises ConfigError for what is no tree, and for another number of drafts than it has."""
        tree = parse_tree(self.speculative_token_tree)
        object.__setattr__(self, "speculative_token_tree", tree)
        if self.num_speculative_tokens not in (None, len(tree)):
            raise ConfigError(
                f"num_speculative_tokens of speculative_config is "
                f"{self.num_speculative_tokens!r}, but speculative_token_tree has {len(tree)} "
                f"drafts; set it to {len(tree)}, or leave it out."
            )
        object.__setattr__(self, "num_speculative_tokens", len(tree))

    def _resolve_grown_tree(self) -> None:
        """Raises ConfigError for sizes out of range, or that do not go together."""
        count = self.num_speculative_tokens
        if self.depth is None and type(count) is int:
            object.__setattr__(self, "depth", min(_DEPTH, count))
        for name, most in (
            ("num_speculative_tokens", MAX_TREE_TOKENS),
            ("top_k", MAX_TOP_K),
            ("depth", MAX_SPECULATIVE_TOKENS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(
                    f"{name} of speculative_config is {value!r}; with a tree of drafts (top_k) it "
                    f"must be an integer in 1..{most}."
                )
        guesses = self.top_k + (self.depth - 1) * self.top_k**2
        if not self.depth <= count <= guesses:
            raise ConfigError(
                f"num_speculative_tokens of speculative_config is {count}; a tree with a top_k of "
                f"{self.top_k} and a depth of {self.depth} has {self.depth} to {guesses} drafts."
            )

    @property
    def tree_depth(self) -> int:
        """Drafts of the longest path of a tree; 0 where each draft follows the one before."""
        if self.speculative_token_tree is not None:
            return len(self.speculative_token_tree[-1])
        return self.depth or 0

    @property
    def branches(self) -> int:
        """Drafts that may follow one token; 1 where the tree is grown by the device, for its rule
        of acceptance is the exact one."""
        tree = self.speculative_token_tree
        return 1 + max(path[-1] for path in tree) if tree else 1

    @property
    def has_layers(self) -> bool:
        """As `DraftMethod.has_layers`."""
        return METHODS[self.method].has_layers

    @property
    def computed(self) -> bool:
        """As `DraftMethod.computed`."""
        return METHODS[self.method].computed

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of drafts that a step may verify of each sequence, ascending from 0."""
        if self.num_speculative_tokens == "auto":
            return AUTO_LENGTHS
        return (0, self.num_speculative_tokens)

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """The config in a dict or in JSON. Raises ConfigError when it is neither, or incomplete."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(
                    f"speculative_config is {value!r}, which is not JSON: {error}."
                ) from None
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative_config is {value!r}; it must be a dict.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(
                    f"speculative_config has {name!r}; its keys are {', '.join(known)}."
                )
        return cls(**value)
