"""The tables that `jaxserve plan` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.cli.planning.described import Described
from jaxserve.cli.terminal.text import device_name, size
from jaxserve.core.process.tables import table
from jaxserve.runtime.weights.placement import WINDOW
from jaxserve.simulator.deployments.deployment import SessionTimes

if TYPE_CHECKING:
    from jaxserve.runtime.planning.memory import MemoryPlan
    from jaxserve.runtime.programs.compilation.executables import Program, Programs
    from jaxserve.runtime.programs.shapes.program import ProgramShapes
    from jaxserve.runtime.startup.engine_plan import EnginePlan

_SCREEN_TOKENS = 250
"""What a user reads at once, of Fu's "Challenges in Deploying Long-Context Transformers"."""


def turn_lengths(plan: EnginePlan) -> tuple[int, int]:
    """Tokens of a user's prompt and of the screen after it: together the longest request that the
    context and the pool hold, and the host beside it."""
    memory, most = plan.memory, plan.config.max_model_len
    if memory.host_kv is None:
        held = memory.layout.longest(memory.num_pages - 1, most)
    else:
        held = memory.host_kv.longest(most)
    longest = min(held + 1, most)
    screen = min(_SCREEN_TOKENS, longest - 1)
    return longest - screen, screen


def turn(described: Described, sessions: Mapping[str, SessionTimes]) -> str:
    """One user's turn. `sessions`: its times, by where they are from."""
    plan = described.plan
    prompt, screen = turn_lengths(plan)
    at_once = f"{plan.admission.num_at_once(prompt + screen):,}"
    drafts = "" if plan.config.speculative_config is None else ", without drafts"

    heads = "ONE USER'S TURN", *map(str.upper, sessions)
    if len(sessions) == 1:
        heads = ", ".join(heads), ""

    def row(name: str, of: Callable[[SessionTimes], float]) -> tuple[str, ...]:
        return name, *(f"{of(session):,.3f} s" for session in sessions.values())

    return table(
        [
            heads,
            (f"users of {prompt + screen:,} tokens at once", *[at_once] * len(sessions)),
            row(f"prefill of {prompt:,} tokens", lambda session: session.prefill_s),
            row(f"decode of {screen} tokens{drafts}", lambda session: session.decode_s),
            row("switch to another user, by swapping KV", lambda session: session.switch_s),
        ]
    )


def heading(decided: EnginePlan, devices: str | None = None) -> str:
    config, model, mesh = decided.config, decided.shapes.model, decided.shapes.mesh
    several = "" if mesh is None else f"{mesh.size} x "
    found = decided.checkpoint.format if devices is None else "config only"
    experts = ""
    if model.moe is not None:
        total, active = num_parameters(decided)
        experts = f", {total:,} parameters ({active:,} active for each token)"
    return (
        f"{decided.checkpoint.path.name}: {model.architecture}, {config.dtype}, {found}, on "
        f"{devices or several + device_name(decided.device)}{experts}"
    )


def num_parameters(decided: EnginePlan) -> tuple[int, int]:
    """Numbers of parameters in all, and of those that one token is multiplied with."""
    import jax

    from jaxserve.models.moe_specs import active_parameters
    from jaxserve.models.registry import param_specs

    model = decided.checkpoint.config
    specs = param_specs(model)
    return sum(spec.size for spec in jax.tree.leaves(specs)), active_parameters(model, specs)


def memory_table(decided: EnginePlan, scratch: str = "program scratch") -> str:
    memory = decided.memory
    left = memory.limit_bytes - memory.total_bytes
    kv_dtype = decided.config.kv_cache_dtype
    kind = "" if kv_dtype == "auto" else f" in {kv_dtype}"
    kind += " of latents" if decided.shapes.model.mla else ""
    return table(
        [
            ("MEMORY" if memory.num_devices == 1 else "MEMORY OF EACH DEVICE", ""),
            (f"{_weights(decided)}{_stored(decided)}", size(memory.weights_bytes)),
            *_adapters(decided),
            (
                f"KV pool{kind}, {memory.num_pages:,} pages of {memory.page_size}",
                size(memory.kv_bytes),
            ),
            ("page tables, sampling state", size(memory.state_bytes)),
            (scratch, size(memory.scratch_bytes)),
            *_lower_tiers(memory),
            ("total", size(memory.total_bytes)),
            (
                f"may be used (--memory-utilization {decided.config.memory_utilization:g})",
                size(memory.limit_bytes),
            ),
            ("left over" if left >= 0 else "missing", size(abs(left))),
        ]
    )


def _stored(decided: EnginePlan) -> str:
    """How the weights of a quantized checkpoint are held."""
    config, (dequantized, quantized) = decided.config, decided.weights_dequantized
    if not quantized or config.quantization != decided.checkpoint.quantization:
        return ""
    method = decided.checkpoint.quantization
    if not dequantized:
        return f" as stored ({method})"
    if dequantized == quantized:
        return f", dequantized from {method} to {config.dtype}"
    return f" ({method}: {dequantized:,} of {quantized:,} dequantized to {config.dtype})"


def _weights(decided: EnginePlan) -> str:
    """Which weights are on a device."""
    placement = decided.shapes.placement
    if not placement.streamed:
        return "weights"
    staying = len(placement.layer_bytes) - len(placement.streamed)
    layers = f"{staying} layers, " if staying else ""
    return f"weights: embeddings and head, {layers}a window of {WINDOW} layers"


def _adapters(decided: EnginePlan) -> list[tuple[str, str]]:
    config, num_bytes = decided.config, decided.memory.lora_bytes
    if not num_bytes:
        return []
    label = f"LoRA adapters, {config.max_loras} of rank {config.max_lora_rank}, and one to load"
    return [(label, size(num_bytes))]


def _lower_tiers(memory: MemoryPlan) -> list[tuple[str, str]]:
    """Layers and KV in tiers below the device, in parentheses if they are not in device memory."""
    rows = []
    if memory.host_weights_bytes:
        host = size(memory.host_weights_bytes)
        rows.append(("layers on the host", host if memory.host_is_device else f"({host})"))
    if memory.disk_weights_bytes:
        rows.append(("layers on disk", f"({size(memory.disk_weights_bytes)})"))
    if memory.host_kv is not None:
        from jaxserve.runtime.planning.memory import KV_WINDOW, group_pages

        group = group_pages(memory.host_kv)
        label = f"window of KV from the host, {KV_WINDOW} x {group:,} pages of a layer"
        if memory.has_kv_window:
            rows.append((label, size(memory.kv_window_bytes)))
        if memory.shadow is not None:
            label = f"compressed KV of {memory.host_pages:,} host pages, of rank "
            rows.append((label + f"{memory.shadow.rank:,}", size(memory.shadow_bytes)))
    elif memory.staging_bytes:
        rows.append(("transfer buffers", size(memory.staging_bytes)))
    if memory.host_pages:
        host = size(memory.host_bytes)
        label = f"KV pages on the host, {memory.host_pages:,}"
        rows.append((label, host if memory.host_is_device else f"({host})"))
    if memory.disk_pages:
        rows.append((f"KV pages on disk, {memory.disk_pages:,}", f"({size(memory.disk_bytes)})"))
    return rows


def capacity(decided: EnginePlan) -> str:
    """Maximum concurrent requests for each length; the most of all, where the last has that."""
    config, memory = decided.config, decided.memory
    at_once, layout = requests_at_once(decided), memory.layout
    rows = [("CAPACITY", ""), ("tokens in the KV pool", f"{memory.kv_tokens:,}")]
    rows += [
        (
            f"KV pages of the longest request, {_layers(len(group.layers), group.window)}",
            f"{group.most_pages(config.max_model_len, layout.max_chunk, layout.page_size):,}",
        )
        for group in layout.groups
        if layout.windowed
    ]
    if memory.host_kv is not None:
        rows.append(
            (
                f"most of one request, {memory.host_kv.resident(memory.longest_tokens):,} pages of "
                "it in the pool",
                f"{memory.longest_tokens:,}",
            )
        )
        rows += _host_reads(decided)
    rows += [
        (f"requests of {length:,} tokens at once", f"{number:,}") for length, number in at_once
    ]
    if at_once[-1][1] == config.max_num_seqs:
        rows.append(("most requests at once (--max-num-seqs)", f"{config.max_num_seqs:,}"))
    pages = pages_that_fit(memory)
    rows.append(
        (
            f"largest pool that fits (--kv-cache-memory-bytes {pages * memory.page_bytes})",
            f"{memory.tokens_of(pages):,} tokens",
        )
    )
    return table(rows)


_RATES = {
    "to_device": "copies to the device",
    "to_host": "copies to the host",
    "decode": "KV that a decode attends to on the host",
    "chunk": "KV that a prefill token attends to on the host",
}


def _host_reads(decided: EnginePlan) -> list[tuple[str, str]]:
    """What steps copy to attend to pages on the host, and the rates that this was chosen by."""
    config, memory, host = decided.config, decided.memory, decided.shapes.host_kv
    pages = memory.host_kv.on_host(config.max_model_len) // memory.layout.num_full
    after = f"a decode after {config.max_model_len:,} tokens"
    decode = next(key for key in decided.shapes.layouts if not key.prefill_tokens)
    rows = [("to attend to pages on the host, steps", f"{host}")]
    if memory.shadow is not None:
        num_bytes = memory.shadow.most_recalled_bytes(pages)
        rows.append((f"values that {after} reads, at most", size(num_bytes)))
    elif decode in host.by_queries:
        rows.append((f"queries and results of {after}", size(host.reads.query_bytes(1))))
    else:
        num_bytes = host.reads.page_bytes(pages * memory.page_size)
        rows.append((f"KV that {after} reads from the host", size(num_bytes)))
    if (sparf := decided.shapes.sparf) is not None:
        label = f"{sparf.components} features of keys, and {sparf.selected:,} tokens, that {after}"
        rows.append((f"{label} reads", size(sparf.read_bytes(pages * memory.page_size))))
    if config.host_attention == "auto" and host.rates is not None:
        rates = host.rates._asdict().items()
        rows += [(f"measured: {_RATES[name]}", f"{size(int(rate))}/s") for name, rate in rates]
    return rows


def _layers(count: int, window: int | None) -> str:
    layers = f"{count} layers" if count > 1 else "1 layer"
    return layers if window is None else f"{layers} with a window of {window:,}"


def requests_at_once(decided: EnginePlan) -> list[tuple[int, int]]:
    """How many requests run at once of each length: `max_model_len`, half of it, and so on, down to
    the length at which `max_num_seqs` of them run."""
    length, found = decided.config.max_model_len, []
    while True:
        found.append((length, decided.admission.num_at_once(length)))
        if found[-1][1] == decided.config.max_num_seqs or length <= decided.memory.page_size:
            return found
        length //= 2


def pages_that_fit(memory: MemoryPlan) -> int:
    return (memory.limit_bytes - memory.total_bytes) // memory.page_bytes + memory.num_pages


def placement_table(shapes: ProgramShapes) -> str:
    """Placement on the mesh: parameters, and the pages of one layer per stage."""
    import jax

    from jaxserve.models.family import AnySpec
    from jaxserve.runtime.programs.shapes.kv import PAGE_NAMES, PAGES
    from sharding_rules import NamedArray, placement

    def named(spec: AnySpec) -> Any:
        if not spec.split:
            return NamedArray(spec.shape, spec.dtype or shapes.dtype, spec.axes)
        planes = spec.abstract(shapes.dtype)
        return {
            name: NamedArray(plane.shape, plane.dtype, spec.plane_axes(plane.shape))
            for name in ("values", "scales", "minima", "order")
            if (plane := getattr(planes, name)) is not None
        }

    params = jax.tree.map(named, shapes.specs)
    kv = [
        {
            name: NamedArray(array.shape, array.dtype, names)
            for name, names in PAGE_NAMES.items()
            if (array := getattr(layer, name, None)) is not None
        }
        for layer in shapes.kv.abstract
    ]
    return str(placement(params | {"kv": kv}, shapes.mesh, shapes.params.rules | PAGES))


def program_summary(programs: Programs) -> str:
    """How many programs there are, where they are from, and which needs the most memory."""
    from_cache = sum(program.from_cache for program in programs.values())
    largest = by_scratch(programs)[0]
    return table(
        [
            ("PROGRAMS", ""),
            ("programs", f"{len(programs):,}"),
            ("from the cache", f"{from_cache:,}"),
            ("compiled now", f"{len(programs) - from_cache:,}"),
            (f"most scratch memory ({largest.name})", size(largest.temp_bytes)),
            ("each of them", "--programs"),
        ]
    )


def program_list(programs: Programs) -> str:
    rows = [("PROGRAMS", "scratch", "results", "from")]
    rows += [
        (
            program.name,
            size(program.temp_bytes),
            size(program.output_bytes),
            "cache" if program.from_cache else "compiler",
        )
        for program in by_scratch(programs)
    ]
    return table(rows)


def program_names(decided: EnginePlan) -> list[str]:
    """Of all programs of an engine, without compiling any."""
    from jaxserve.runtime.program_kinds import ProgramKinds

    return [spec.name for spec in ProgramKinds(decided.shapes).specs()]


def uncompiled_programs(names: Sequence[str], each: bool) -> str:
    """How many programs there are, or the name of `each`; only their compiler knows the rest."""
    if each:
        return table([("PROGRAMS", "scratch"), *((name, "unknown") for name in names)])
    return table(
        [("PROGRAMS", ""), ("programs", f"{len(names):,}"), ("each of them", "--programs")]
    )


def by_scratch(programs: Programs) -> list[Program]:
    return sorted(programs.values(), key=lambda program: -program.temp_bytes)
