"""Partitioning of a model for a mesh: heads and widths that divide, layers stacked by stage.

Every rank runs the same program on its own share, so shares must be equal. If there are fewer KV
heads than ranks, they are replicated and their queries split among the copies; dimensions that
still do not divide are padded with zeros, which add nothing (sharding_rules/heads.py). The layers
at the same position of each pipeline stage are stacked into one parameter.

The rest of the engine is unaffected: the result is an ordinary config and specs, and programs
compute with each rank's share of them (`local`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.family import AnySpec, Params, ParamSpec, Rearranged, Stacked
from jaxserve.models.quantization_scheme import has_few_scales
from pallas_kernels.quantized_matmul import Format
from sharding_rules import HeadLayout, pad_to

_SPLIT_INPUTS = ("kv_heads", "mlp", "expert_mlp")
"""Inputs that ranks of `tensor` have their parts of."""


def partition(
    config: ModelConfig,
    specs: Params,
    *,
    tensor: int,
    stages: int,
    vocab: int,
    expert_ranks: int | None = None,
) -> tuple[ModelConfig, Params]:
    """`config` and `specs` of a model split over `tensor` ranks and `stages`.

    `vocab`: ranks that the vocabulary is split over. `expert_ranks`: ranks of a stage that have
    some of the experts each; None for a part of every expert on each rank of `tensor`. The returned
    config has the heads of the returned specs. A parameter keeps its format where its planes divide
    as they are: without padding, between groups of inputs, which may become smaller, and with the
    same format in every stage. Raises ConfigError when stages do not divide the layers, or would
    have layers of different kinds at the same position, or the ranks do not divide the experts.
    """
    heads = HeadLayout(config.num_heads, config.num_kv_heads, tensor)
    padded = {"mlp": tensor, "vocab": vocab}
    whole_experts = expert_ranks is not None
    if whole_experts:
        _check_experts(config, expert_ranks)
    else:
        padded["expert_mlp"] = tensor
    fit = functools.partial(_fit, heads=heads, padded=padded)

    def fit_any(spec: ParamSpec) -> ParamSpec | Rearranged:
        if spec.format is None:
            return fit(spec)
        split = () if whole_experts and "experts" in spec.axes else _SPLIT_INPUTS
        fitted = fit(spec)
        arranged = isinstance(fitted, Rearranged)
        format = None if arranged else _split_format(fitted, tensor, split)
        if format is None:
            return fit(dataclasses.replace(spec, format=None))
        return dataclasses.replace(fitted, format=format, split=True)

    specs = jax.tree.map(fit_any, specs)
    if stages > 1:
        specs = specs | {"layers": _by_stage(config, specs["layers"], stages)}
    partitioned = dataclasses.replace(
        config,
        num_heads=heads.kv_heads * heads.group,
        num_kv_heads=heads.kv_heads,
        normed_heads=(config.num_heads, config.num_kv_heads * heads.copies),
    )
    return partitioned, specs


def local(config: ModelConfig, *, tensor: int, stages: int) -> ModelConfig:
    """One rank's part of a partitioned `config`: its heads, and the layers of a stage."""
    count = config.num_layers // stages
    moe = config.moe
    if moe is not None:
        moe = dataclasses.replace(moe, sparse_layers=moe.sparse_layers[:count])
    return dataclasses.replace(
        config,
        num_layers=count,
        num_heads=config.num_heads // tensor,
        num_kv_heads=config.num_kv_heads // tensor,
        sliding_windows=config.sliding_windows[:count],
        rope_layers=config.rope_layers[:count],
        moe=moe,
    )


def _check_experts(config: ModelConfig, ranks: int) -> None:
    experts = config.moe.num_experts if config.moe else 0
    if experts % ranks:
        raise ConfigError(
            f"enable_expert_parallel splits {experts} experts over {ranks} devices, "
            "tensor_parallel_size times context_parallel_size, which does not divide them; choose "
            f"a product of {', '.join(map(str, _divisors(experts)))}, or leave "
            "enable_expert_parallel out to split every expert."
        )


def _split_format(spec: ParamSpec, tensor: int, split: Collection[str]) -> Format | None:
    """The format of a packed parameter in which each of `tensor` ranks has whole groups of the
    inputs that it contracts, where those are `split`: its own, or one of smaller groups; None if
    there is none. Experts multiply some tokens each, whose inputs in another order are not gathered
    from the ranks."""
    format, inputs = spec.format, spec.matrix[1] // tensor
    if spec.axes[-spec.num_inputs] not in split:
        return format
    if format.ordered and "experts" in spec.axes:
        return None
    try:
        if format.group_size is not None:
            format = dataclasses.replace(format, group_size=math.gcd(format.group_size, inputs))
        format.num_groups(inputs)
    except ValueError:
        return None
    return format if has_few_scales(format) else None


def _fit(spec: ParamSpec, heads: HeadLayout, padded: dict[str, int]) -> ParamSpec | Rearranged:
    """The parameter with dimensions that divide. `padded`: ranks by the name of a dimension that is
    padded to a multiple of them."""
    for name, ranks in padded.items():
        if name in spec.axes:
            first = spec.axes.index(name)
            size = spec.shape[first]
            return _arranged(spec, first, _padded(np.arange(size), pad_to(size, ranks)))
    if "kv_heads" not in spec.axes:
        return spec
    first = spec.axes.index("kv_heads")
    match spec.axes[first + 1]:
        case "qkv":
            rows = _qkv_rows(heads)
        case "queries":
            rows = heads.queries()
        case _:
            rows = heads.keys()
    return _arranged(spec, first, rows)


def _qkv_rows(heads: HeadLayout) -> np.ndarray:
    """[kv_heads, group + 2] Indices of a head's queries, key and value in the family's order, which
    is each KV head's queries, then its key and value."""
    per_kv = heads.num_heads // heads.num_kv_heads
    queries, keys = heads.queries(), heads.keys()[:, None]
    queries = queries // per_kv * (per_kv + 2) + queries % per_kv
    both = keys * (per_kv + 2) + per_kv + np.arange(2)
    missing = np.concatenate([heads.queries(), keys, keys], axis=1) < 0
    return np.where(missing, -1, np.concatenate([queries, both], axis=1))


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([rows, np.full(size - len(rows), -1)])


def _arranged(spec: ParamSpec, first: int, rows: np.ndarray) -> ParamSpec | Rearranged:
    """The parameter with these rows; unchanged if it has them already, and a ParamSpec of another
    shape if they are only grouped otherwise, such as queries of one KV head by its copies."""
    after = first + rows.ndim
    before = spec.shape[first:after]
    if not np.array_equal(rows.reshape(-1), np.arange(math.prod(before))):
        return Rearranged(spec, first, rows)
    if rows.shape == before:
        return spec
    part, *others = spec.parts
    if others or part.shape[first:after] != before:
        return Rearranged(spec, first, rows)

    def regrouped(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:first], *rows.shape, *shape[after:])

    part = dataclasses.replace(part, shape=regrouped(part.shape))
    return dataclasses.replace(spec, shape=regrouped(spec.shape), parts=(part,))


def _by_stage(config: ModelConfig, layers: list[Params], stages: int) -> list[Params]:
    """Layers at the same position of each stage, stacked: as many as one stage has."""
    if config.num_layers % stages:
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, but the model has {config.num_layers} layers; "
            f"choose one of {', '.join(map(str, _divisors(config.num_layers)))}."
        )
    count = config.num_layers // stages
    kinds = config.layer_kinds
    for place in range(count):
        there = {kinds[stage * count + place] for stage in range(stages)}
        if len(there) > 1:
            fitting = [
                n
                for n in _divisors(config.num_layers)
                if kinds == kinds[: config.num_layers // n] * n
            ]
            raise ConfigError(
                f"pipeline_parallel_size is {stages}, but then layers of different kinds would run "
                f"as one ({', '.join(map(str, sorted(there, key=str)))}); choose one of "
                f"{', '.join(map(str, fitting))}."
            )

    def stacked(*specs: AnySpec) -> Stacked:
        if len({spec.format for spec in specs}) > 1:
            specs = tuple(_unpacked(spec) for spec in specs)
        return Stacked(specs)

    return [jax.tree.map(stacked, *layers[place::count]) for place in range(count)]


def _unpacked(spec: AnySpec) -> AnySpec:
    if spec.format is None:
        return spec
    return dataclasses.replace(spec, format=None, split=False)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
