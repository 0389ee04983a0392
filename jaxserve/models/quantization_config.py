"""`quantization_config` of a `config.json`: how the linear layers of a checkpoint are stored.

Only what says how weights are stored matters here: activations stay in the compute dtype, also
where a checkpoint was made for engines that round them in every step (`input_activations`,
`activation_scheme`), so the model computes with the dequantized weights, and static scales of
activations are left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from typing import Any

from jaxserve.core.errors import ModelError, UnsupportedModelError
from jaxserve.core.model_files import shown
from jaxserve.models.quantization_scheme import ModuleFilter, QuantizationConfig, Scheme

FIELD = "quantization_config"
_LARGEST_SIZE = 1 << 20


def parse(raw: dict[str, Any]) -> QuantizationConfig | None:
    """The `quantization_config` of a parsed `config.json`; None if it has none of METHODS.

    Raises UnsupportedModelError for a field that asks for what is not implemented, by its name and
    value, and ModelError for one that is malformed.
    """
    fields = raw.get(FIELD)
    if fields is None:
        return None
    method, known = method_of(raw), _Fields(fields, FIELD)
    if method in _PARSERS:
        config = _PARSERS[method](known)
    else:  # The tensors of the files say which modules are stored so.
        config = None
        known.get("modules_to_not_convert")
    known.refuse_others(_HARMLESS)
    return config


_HARMLESS = {
    # Names of the same, of which one is read.
    *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size"),
    # What made the checkpoint, from which data and how.
    *("backend", "dataset", "tokenizer", "model_name_or_path", "model_file_base_name", "meta"),
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "nsamples"),
    *("batch_size", "cache_block_outputs", "model_seqlen", "seqlen", "pad_token_id", "quantizer"),
    *("parallel_packing", "act_group_aware", "hyb_act", "offload_to_disk", "iters", "lr", "amp"),
    *("autoround_version", "low_gpu_mem_usage", "enable_quanted_input", "enable_minmax_tuning"),
    *("gradient_accumulate_steps", "minmax_lr", "global_compression_ratio", "compression_ratio"),
    # Which modules it went through: the files name those that are stored otherwise.
    *("block_name_to_quantize", "module_name_preceding_first_block", "to_quant_block_names"),
    *("modules_in_block_to_quantize", "quant_block_list"),
    # What other engines do with it.
    *("use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16"),
    *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "is_checkpoint_fp8_serialized"),
}
"""Fields that say nothing of how the weights in the files are stored."""


def method_of(raw: dict[str, Any]) -> str | None:
    """The `quant_method` of a parsed `config.json`, None without one."""
    fields = raw.get(FIELD)
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    return method if isinstance(method, str) else None


class _Fields:
    """The fields of an object in `config.json`, read and refused by name."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise ModelError(f"config.json has {where} {shown(fields)}; it must be an object.")
        self._fields, self._where = fields, where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._fields.get(name)
        return default if value is None else value

    def inner(self, name: str) -> _Fields:
        return _Fields(self.get(name), f"{self._where}.{name}")

    def one_of(self, name: str, known: Collection[Any], default: Any = None) -> Any:
        """The field `name`, of the values in `known`; UnsupportedModelError for another one."""
        value = self.get(name, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(each) and value == each for each in known):
            raise UnsupportedModelError(
                f"config.json has {self._where}.{name} {shown(value)}, which is not implemented; "
                f"{' and '.join(map(repr, known))} {'are' if len(known) > 1 else 'is'}."
            )
        return value

    def absent(self, *names: str) -> None:
        """Raises UnsupportedModelError for one of these fields that has a value."""
        for name in names:
            if self.get(name) not in (None, False, [], {}, ""):
                raise UnsupportedModelError(
                    f"config.json has {self._where}.{name} {shown(self.get(name))}, which is not "
                    "implemented; use a checkpoint without."
                )

    def refuse_others(self, harmless: Collection[str]) -> None:
        """Raises UnsupportedModelError for a field with a value that was not read and is not known
        to say nothing of how weights are stored."""
        self.absent(*sorted(self._fields.keys() - self._read - set(harmless)))

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.malformed(name, "true or false")
        return value

    def size(self, name: str) -> int:
        """A number of inputs or outputs."""
        value = self.get(name)
        if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
            raise self.malformed(name, f"an integer of at least 1 and at most {_LARGEST_SIZE}")
        return value

    def group(self, name: str) -> int | None:
        """Inputs that share a scale; None for all, which files write as -1."""
        return None if self.get(name) == -1 else self.size(name)

    def block(self, name: str) -> tuple[int, int] | None:
        """Outputs and inputs of a block."""
        sizes = self.get(name)
        if sizes is None:
            return None
        if not isinstance(sizes, list) or len(sizes) != 2:
            raise self.malformed(name, "a list of two sizes")
        each = _Fields(dict(zip(("0", "1"), sizes)), f"{self._where}.{name}")
        return each.size("0"), each.size("1")

    def names(self, *fields: str) -> tuple[str, ...]:
        """The strings that these fields list."""
        found: list[str] = []
        for field in fields:
            values = self.get(field, [])
            if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
                raise self.malformed(field, "a list of strings")
            found += values
        return tuple(found)

    def malformed(self, name: str, required: str) -> ModelError:
        return ModelError(
            f"config.json has {self._where}.{name} {shown(self.get(name))}; it must be {required}."
        )


def _fp8(fields: _Fields) -> QuantizationConfig:
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
    fields.one_of("expert_dtype", ("fp8",), "fp8")
    fields.absent("kv_cache_scheme", "modules_to_convert")
    block = fields.block("weight_block_size")
    rows, group = block or (None, None)
    names = ("weight_scale_inv",) if block else ("weight_scale", "weight_scale_inv")
    scheme = Scheme("fp8", 8, group_size=group, rows=rows, scale_names=names)
    ignored = fields.names("modules_to_not_convert", "ignored_layers")
    return QuantizationConfig("fp8", ((_not_the_head, scheme),), _parts_of_names(ignored))


def _awq(fields: _Fields) -> QuantizationConfig:
    fields.one_of("bits" if fields.get("w_bit") is None else "w_bit", (4,), 4)
    for name in ("version", "format"):
        fields.one_of(name, ("gemm",), "gemm")
    fields.one_of("zero_point", (True,), True)
    group = fields.group("group_size" if fields.get("q_group_size") is None else "q_group_size")
    scheme = Scheme("awq", 4, symmetric=False, group_size=group, scale_names=("scales",))
    ignored = fields.names("modules_to_not_convert")
    return QuantizationConfig("awq", ((_not_the_head, scheme),), _parts_of_names(ignored))


def _gptq(fields: _Fields) -> QuantizationConfig:
    bits = fields.one_of("bits", (4, 8))
    versions = [
        fields.one_of(name, ("gptq", "gptq_v2"), "gptq") for name in ("checkpoint_format", "format")
    ]
    fields.one_of("pack_dtype", ("int32",), "int32")
    # `dynamic` has other settings for some modules.
    fields.absent("is_marlin_format", "dynamic")
    scheme = Scheme(
        "gptq",
        bits,
        symmetric=fields.boolean("sym", True),
        group_size=fields.group("group_size"),
        reordered=fields.boolean("desc_act", False),
        zeros_less_one="gptq_v2" not in versions,
        scale_names=("scales",),
    )
    targets = _any_module if fields.boolean("lm_head", False) else _not_the_head
    ignored = fields.names("modules_to_not_convert")
    return QuantizationConfig("gptq", ((targets, scheme),), _parts_of_names(ignored))


_OF_COMPRESSED_TENSORS: dict[str, tuple[str, ...]] = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""Types of values by format."""
_FORMATS = tuple(_OF_COMPRESSED_TENSORS)


def _compressed_tensors(fields: _Fields) -> QuantizationConfig:
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    fields.get("version")
    fields.absent("kv_cache_scheme", "transform_config", "moe_sparsity_config")
    if fields.get("sparsity_config"):
        fields.inner("sparsity_config").one_of("format", ("dense",), "dense")
    format = fields.one_of("format", (*_FORMATS, "mixed-precision"), "dense")
    groups = fields.inner("config_groups")
    schemes = []
    for name in fields.get("config_groups"):
        group = groups.inner(name)
        targets = group.names("targets")
        schemes.append((targets, _scheme_of_group(group, format)))
    # Names count before classes.
    schemes.sort(key=lambda each: "Linear" in each[0])
    return QuantizationConfig(
        "compressed-tensors",
        tuple((_names_or_patterns(targets), scheme) for targets, scheme in schemes),
        _names_or_patterns(fields.names("ignore")),
    )


def _scheme_of_group(group: _Fields, default: str) -> Scheme:
    format = group.one_of("format", _FORMATS, default)
    group.absent("output_activations")
    if group.get("input_activations") is not None:
        group.inner("input_activations").one_of("dynamic", (True, False), False)
    weights = group.inner("weights")
    group.refuse_others(())
    weights.absent("dynamic")
    kind = weights.one_of("type", _OF_COMPRESSED_TENSORS[format], "int")
    packed = format == "pack-quantized"
    bits = weights.one_of("num_bits", (4, 8) if packed else (8,), 8)
    inputs = None if weights.get("group_size") is None else weights.group("group_size")
    strategy = weights.one_of(
        "strategy",
        ("tensor", "channel", "group", "block"),
        "channel" if weights.get("group_size") == -1 else "group" if inputs else "tensor",
    )
    if strategy == "group" and inputs is None:
        raise weights.malformed("group_size", "an integer of at least 1 with strategy 'group'")
    rows: int | None = 1
    if strategy == "block":
        block = weights.block("block_structure")
        if block is None:
            raise weights.malformed("block_structure", "a list of two sizes with strategy 'block'")
        rows, inputs = block
    elif strategy != "group":
        rows, inputs = None if strategy == "tensor" else 1, None
    if rows != 1:
        # Zero points of blocks are in no published file.
        weights.one_of("symmetric", (True,), True)
    order = weights.one_of("actorder", ("weight", "static", "group", "dynamic", True, False), False)
    weights.get("symmetric")
    weights.refuse_others(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
    return Scheme(
        "packed" if packed else "int8" if kind == "int" else "fp8",
        bits,
        symmetric=weights.boolean("symmetric", True),
        group_size=inputs,
        rows=rows,
        reordered=order in ("group", "dynamic") or order is True,
    )


_PARSERS: dict[str, Callable[[_Fields], QuantizationConfig]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}
METHODS = tuple(_PARSERS)
"""Values of `quant_method` that are read here, for every family."""


def _any_module(module: str) -> bool:
    return True


def _not_the_head(module: str) -> bool:
    return module.rpartition(".")[2] != "lm_head"


def _parts_of_names(names: Collection[str]) -> ModuleFilter:
    """Matches modules whose names have all parts of one of `names` in a row: "layers.1" is meant by
    neither "layers.10" nor "my_layers.1"."""
    parts = [f".{name.removesuffix('.weight').strip('.')}." for name in names]
    return lambda module: any(part in f".{module}." for part in parts)


_MAX_CHOICES, _MAX_CHARS = 4, 500


def _names_or_patterns(names: Collection[str]) -> ModuleFilter:
    """Matches modules by compressed-tensors' rules: `names` are of modules, of their class, which
    is Linear for all that are asked about, or "re:" and a pattern for the beginning of a name."""
    patterns = [_pattern(name.removeprefix("re:")) for name in names if name.startswith("re:")]
    exact = frozenset(names)

    @functools.cache
    def matches(module: str) -> bool:
        if module in exact or "Linear" in exact:
            return True
        return any(pattern.match(module) for pattern in patterns)

    return matches


def _pattern(text: str) -> re.Pattern[str]:
    """Raises ModelError for a text that is no pattern, UnsupportedModelError for one that could
    take for ever."""
    where = f"config.json has {FIELD} with the pattern {shown(text)}"
    repeats, groups = len(re.findall(r"[*+{]|(?<!\()\?", text)), text.count("(")
    nested = re.search(r"\)[*+{]|\\\d", text)
    if nested or max(repeats, groups) > _MAX_CHOICES or len(text) > _MAX_CHARS:
        raise UnsupportedModelError(
            f"{where}, which could take too long to match; write the names instead."
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{where}, which is no pattern: {error}.") from error
