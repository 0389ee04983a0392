"""LoRA adapters in directories that PEFT wrote: `adapter_config.json` beside safetensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.core.errors import AdapterError, ModelError
from jaxserve.core.model_files import check_regular, read_json, shown
from jaxserve.models.family import AnySpec, Params, ParamSpec
from jaxserve.models.loading.assemble import by_slice, cut
from jaxserve.models.loading.safetensors import slices_of
from jaxserve.models.lora import A, B, modules_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_BESIDE_VISION = "language_model."
_MAX_ALPHA = 1e30
_ABSENT = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save"),
    *("layer_replication", "trainable_token_indices", "target_parameters"),
    *("use_qalora", "alora_invocation_tokens", "arrow_config", "use_bdlora"),
)
"""Options that change what an adapter computes and are not implemented; PEFT writes null, false or
an empty collection where they are not used."""
_PATTERNS = (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
"""What all modules have, and what some of them have instead."""
_MODULE = re.compile(r"\w[\w.]*")
_SOME_LAYERS = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Options with which an adapter changes some of the layers that have its targets."""
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter on the host: its tensors [rank, in] and [out, rank] by their names beside the
    model's own, and the factors of its products by the names of the second ones. `digest` is of
    its contents."""

    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    scales: Mapping[str, float] = dataclasses.field(repr=False)
    digest: str

    def placed(self, specs: list[Any], shardings: list[Any], dtype: np.dtype) -> Iterator[Any]:
        """Its arrays for each layer of `specs`, those of one adapter, made when they are asked
        for."""

        def array(spec: AnySpec, sharding: Sharding) -> jax.Array:
            return by_slice(
                spec.shape,
                sharding,
                lambda index: cut(
                    lambda plain, inside: self._read(plain)[inside].astype(dtype), spec, index
                ),
            )

        for own, places in zip(specs, shardings):
            yield jax.tree.map(array, own, places)

    def _read(self, spec: ParamSpec) -> np.ndarray:
        """Float32 entries of a family's parameter; zero above the rank, and without a tensor."""
        whole = np.zeros(spec.shape, np.float32)
        for place, part in enumerate(spec.parts):
            tensor = self.tensors.get(part.tensor)
            if tensor is None:
                continue
            if part.tensor.endswith(A):
                inputs = spec.shape[3:]
                whole[0, place, : len(tensor)] = tensor.reshape(len(tensor), *inputs)
            else:
                outputs = spec.shape[:-2]
                rows = tensor[part.first : part.first + math.prod(outputs)].astype(np.float32)
                whole[..., 0, : rows.shape[1]] = (rows * self.scales[part.tensor]).reshape(
                    *outputs, -1
                )
        return whole


def read_adapter(path: str | Path, specs: Params, max_rank: int, dtype: np.dtype) -> Adapter:
    """The adapter in a directory, for the model with a family's `specs`, to be held in `dtype`.

    Raises AdapterError when it cannot be read, is of another base model, needs an option that is
    not implemented, targets what the model lacks or adapters cannot change, has a rank above
    `max_rank`, or numbers that are not finite.
    """
    try:
        return _read_adapter(Path(path).expanduser(), specs, max_rank, dtype)
    except AdapterError:
        raise
    except (ModelError, OSError, RuntimeError) as error:  # The last for the home of an unknown user
        raise AdapterError(f"the LoRA adapter cannot be read: {error}") from error


def _read_adapter(path: Path, specs: Params, max_rank: int, dtype: np.dtype) -> Adapter:
    if not path.is_dir():
        raise AdapterError(f"there is no directory {str(path)!r}; give one that PEFT wrote.")
    config = read_json(path / CONFIG)
    _check_options(path, config)
    ranks, alphas = (_by_module(path, config, *names) for names in _PATTERNS)
    for rank in ranks.values():
        _check_rank(path, rank, max_rank)
    for alpha in alphas.values():
        _check_alpha(path, alpha)
    file = path / WEIGHTS
    if not file.exists() and (path / _PICKLE).exists():
        raise AdapterError(
            f"{path / _PICKLE} is a pickle, which can run any code when loaded and is never read; "
            "save the adapter with safe_serialization=True."
        )
    check_regular(file)
    found = {_own_name(name): part for name, part in slices_of(file).items()}
    modules = {name.replace(_BESIDE_VISION, ""): name for name in modules_of(specs)}
    sizes = modules_of(specs)
    tensors, scales = {}, {}
    for name, part in found.items():
        module, ending = _split(name)
        if module not in modules:
            if module.rpartition(".")[2] in _short(modules):
                raise _of_another_base(path, config, f"changes {name[:200]}, which is not there")
            raise AdapterError(
                f"{path} changes {name[:200]}, which is no linear layer that adapters can change "
                f"here; those of a layer are {', '.join(_short(modules))}."
            )
        outputs, inputs = sizes[modules[module]]
        rank, alpha = _of(ranks, module), _of(alphas, module)
        wanted = (rank, inputs) if ending == A else (outputs, rank)
        if (shape := tuple(part.get_shape())) != wanted:
            raise _misfit(path, config, rank, name, shape, wanted)
        if module + (B if ending == A else A) not in found:
            raise AdapterError(f"{path} has {name[:200]} without its other half; save it again.")
        tensors[modules[module] + ending] = part
        # alpha / r, or alpha / sqrt(r) with rsLoRA (2312.03732).
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        scales[modules[module] + B] = alpha / divisor
    _check_targets(path, config, {_split(name)[0] for name in found}, modules)
    digest = hashlib.blake2b(json.dumps(scales, sort_keys=True).encode(), digest_size=16)
    read = {}
    for name, part in sorted(tensors.items()):
        read[name] = part[:]
        _check_finite(path, name, read[name], abs(scales.get(name, 1.0)), dtype)
        digest.update(name.encode() + np.ascontiguousarray(read[name]).tobytes())
    return Adapter(read, scales, digest.hexdigest())


def _check_options(path: Path, config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise AdapterError(f"{path} has peft_type {shown(kind)}; only LORA is implemented.")
    options = {name: config[name] for name in _ABSENT if config.get(name)}
    if config.get("bias", "none") != "none":
        options["bias"] = config["bias"]
    how = config.get("init_lora_weights", True)
    if how not in _INITIALISATIONS:
        raise AdapterError(
            f"{path} has init_lora_weights {shown(how)}, which changes the base weights as well; "
            "save it as a plain adapter (path_initial_model_for_weight_conversion in PEFT)."
        )
    for name, value in options.items():
        raise AdapterError(
            f"{path} has {name} {shown(value)}, which is not implemented; merge the adapter into "
            "the weights, or train one without."
        )


def _by_module(path: Path, config: Mapping[str, Any], whole: str, some: str) -> dict[str, Any]:
    """What the config says of all modules, by "", and of some, by the ends of their names."""
    pattern = config.get(some) or {}
    if not isinstance(pattern, dict) or not all(map(_MODULE.fullmatch, pattern)):
        raise AdapterError(
            f"{path} has {some} {shown(pattern)}; it must be an object whose names are those of "
            "modules, or the ends of these, without regular expressions."
        )
    return {"": config.get(whole), **pattern}


def _of(values: Mapping[str, Any], module: str) -> Any:
    """The first entry that means a module, as in PEFT."""
    return next(
        (each for name, each in values.items() if name and _names(name, module)), values[""]
    )


def _check_rank(path: Path, rank: Any, max_rank: int) -> None:
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{path} has r {shown(rank)}; it must be an integer of 1 or more.")
    if rank > max_rank:
        raise AdapterError(
            f"{path} has r {shown(rank)}, and max_lora_rank is {max_rank}; load the engine with "
            f"max_lora_rank of {shown(rank)} or more."
        )


def _check_alpha(path: Path, alpha: Any) -> None:
    if type(alpha) not in (int, float) or not abs(alpha) <= _MAX_ALPHA:
        raise AdapterError(
            f"{path} has lora_alpha {shown(alpha)}; it must be a number of at most {_MAX_ALPHA:g}."
        )


def _check_targets(
    path: Path, config: Mapping[str, Any], found: set[str], modules: Collection[str]
) -> None:
    """Raises AdapterError when the file lacks what the config names, in some of the model's layers
    or in all."""
    targets = config.get("target_modules")
    if not found:
        raise AdapterError(f"{path / WEIGHTS} has no tensors; save the adapter again.")
    of_some_layers = any(config.get(name) is not None for name in _SOME_LAYERS)
    for target in targets if isinstance(targets, list) else ():
        if not isinstance(target, str) or not any(_names(target, module) for module in found):
            raise AdapterError(
                f"{path} names {shown(target)} in target_modules, and {WEIGHTS} has no tensor of "
                "it; save the adapter again."
            )
        named = [module for module in modules if _names(target, module)]
        lacking = [module for module in named if module not in found]
        if lacking and not of_some_layers:
            has = f"has {target} in {len(named) - len(lacking)} of {len(named)} layers"
            raise _of_another_base(path, config, f"{has}, and not in {lacking[0]}")


def _names(target: str, module: str) -> bool:
    """Whether an entry of target_modules means a module."""
    return module == target or module.endswith(f".{target}")


def _misfit(
    path: Path,
    config: Mapping[str, Any],
    rank: int,
    name: str,
    shape: Sequence[int],
    wanted: Sequence[int],
) -> AdapterError:
    """The error for a tensor of another shape: its rank is not that of the config, or its other
    dimension not that of the model."""
    side = 1 if name.endswith(A) else 0
    if len(shape) == 2 and shape[side] == wanted[side]:
        return AdapterError(
            f"{path} has r {shown(rank)}, and {name[:200]} has shape {list(shape)}; save "
            "the adapter again."
        )
    what = f"has {name[:200]} of shape {list(shape)}, and here it must be {list(wanted)}"
    return _of_another_base(path, config, what)


def _of_another_base(path: Path, config: Mapping[str, Any], what: str) -> AdapterError:
    base = shown(config.get("base_model_name_or_path"))
    return AdapterError(f"{path} is for another base model, {base}: it {what}.")


def _check_finite(
    path: Path, name: str, tensor: np.ndarray, factor: float, dtype: np.dtype
) -> None:
    """Raises AdapterError for numbers that `dtype` does not hold once multiplied: a step multiplies
    the tokens of other adapters with them too, by zero."""
    largest = np.abs(tensor.astype(np.float32)).max(initial=0.0) * factor
    if not largest <= float(jax.numpy.finfo(dtype).max):
        raise AdapterError(
            f"{path}: {name} has numbers that are not finite in {dtype}; it was perhaps damaged, "
            "or its training diverged."
        )


def _own_name(name: str) -> str:
    """A tensor's name as models write it, without what PEFT and a vision tower put before."""
    return name.removeprefix(_PREFIX).replace(_BESIDE_VISION, "")


def _split(name: str) -> tuple[str, str]:
    """The linear layer of a tensor, and which of the two factors it is; ("", "") for others."""
    for ending in (A, B):
        if name.endswith(ending):
            return name.removesuffix(ending), ending
    return "", ""


def _short(modules: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
