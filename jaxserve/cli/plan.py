"""`jaxserve plan`: memory and capacity of an engine, without running it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jaxserve.cli.options import Common, ModelSettings
from jaxserve.cli.text import device_name, size
from jaxserve.core.tables import table
from jaxserve.runtime.progress import TerminalProgress

if TYPE_CHECKING:
    from jaxserve.runtime.memory import MemoryPlan
    from jaxserve.runtime.programs.executables import Program, Programs
    from jaxserve.runtime.programs.program_shapes import ProgramShapes
    from jaxserve.runtime.startup import EnginePlan


@dataclasses.dataclass(frozen=True)
class Plan(Common):
    """Print the exact memory, capacity and programs of an engine, without reading its weights.

    For a model that does not fit, print what it needs, and settings with which it would fit.
    The programs are compiled, or loaded from the cache, because only the compiler knows how much
    scratch memory they need.

    Attributes:
        programs: list every program with its scratch memory, not only their number.
        json: print one JSON object, with all sizes in bytes and every program.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    programs: bool = False
    json: bool = False

    def run(self) -> int:
        from jaxserve.runtime import startup

        decided = startup.decide(self.engine)
        if not decided.memory.fits and not self.json:
            print(_heading(decided), _memory(decided), sep="\n\n", flush=True)
        decided = startup.accept(decided)
        with TerminalProgress() as progress:
            programs = decided.compile(progress).result()
        decided = decided.with_programs(programs)
        if self.json:
            print(json.dumps(_document(decided, programs), default=str))
            return 0
        parts = [_heading(decided), _memory(decided), _capacity(decided)]
        if decided.shapes.mesh is not None:
            parts.append(_placement(decided.shapes))
        parts.append(_list(programs) if self.programs else _summary(programs))
        print(*parts, sep="\n\n")
        return 0


def _heading(decided: EnginePlan) -> str:
    config, model, mesh = decided.config, decided.shapes.model, decided.shapes.mesh
    several = "" if mesh is None else f"{mesh.size} x "
    return (
        f"{decided.checkpoint.path.name}: {model.architecture}, {config.dtype}, "
        f"{decided.checkpoint.format}, on {several}{device_name(decided.device)}"
    )


def _memory(decided: EnginePlan) -> str:
    memory = decided.memory
    left = memory.limit_bytes - memory.total_bytes
    return table(
        [
            ("MEMORY" if memory.num_devices == 1 else "MEMORY OF EACH DEVICE", ""),
            ("weights", size(memory.weights_bytes)),
            (f"KV pool, {memory.num_pages:,} pages of {memory.page_size}", size(memory.kv_bytes)),
            ("page tables, sampling state", size(memory.state_bytes)),
            ("program scratch", size(memory.scratch_bytes)),
            *_lower_tiers(memory),
            ("total", size(memory.total_bytes)),
            (
                f"may be used (memory_utilization {decided.config.memory_utilization:g})",
                size(memory.limit_bytes),
            ),
            ("left over" if left >= 0 else "missing", size(abs(left))),
        ]
    )


def _lower_tiers(memory: MemoryPlan) -> list[tuple[str, str]]:
    """KV tiers below the device, in parentheses if they are not in device memory."""
    rows = []
    if memory.staging_bytes:
        rows.append(("transfer buffers", size(memory.staging_bytes)))
    if memory.host_pages:
        host = size(memory.host_bytes)
        label = f"KV pages on the host, {memory.host_pages:,}"
        rows.append((label, host if memory.host_is_device else f"({host})"))
    if memory.disk_pages:
        rows.append((f"KV pages on disk, {memory.disk_pages:,}", f"({size(memory.disk_bytes)})"))
    return rows


def _capacity(decided: EnginePlan) -> str:
    """Maximum concurrent requests for each length; the most of all, where the last has that."""
    config, memory = decided.config, decided.memory
    at_once, layout = _at_once(decided), memory.layout
    rows = [("CAPACITY", ""), ("tokens in the KV pool", f"{memory.kv_tokens:,}")]
    rows += [
        (
            f"KV pages of the longest request, {_layers(len(group.layers), group.window)}",
            f"{group.most_pages(config.max_model_len, layout.max_chunk, layout.page_size):,}",
        )
        for group in layout.groups
        if layout.windowed
    ]
    rows += [
        (f"requests of {length:,} tokens at once", f"{number:,}") for length, number in at_once
    ]
    if at_once[-1][1] == config.max_num_seqs:
        rows.append(("most requests at once (max_num_seqs)", f"{config.max_num_seqs:,}"))
    pages = _pages_that_fit(memory)
    rows.append(
        (
            f"largest pool that fits (kv_cache_memory_bytes {pages * memory.page_bytes})",
            f"{memory.tokens_of(pages):,} tokens",
        )
    )
    return table(rows)


def _layers(count: int, window: int | None) -> str:
    layers = f"{count} layers" if count > 1 else "1 layer"
    return layers if window is None else f"{layers} with a window of {window:,}"


def _at_once(decided: EnginePlan) -> list[tuple[int, int]]:
    """How many requests run at once of each length: `max_model_len`, half of it, and so on, down to
    the length at which `max_num_seqs` of them run."""
    length, found = decided.config.max_model_len, []
    while True:
        found.append((length, decided.admission.num_at_once(length)))
        if found[-1][1] == decided.config.max_num_seqs or length <= decided.memory.page_size:
            return found
        length //= 2


def _pages_that_fit(memory: MemoryPlan) -> int:
    return (memory.limit_bytes - memory.total_bytes) // memory.page_bytes + memory.num_pages


def _placement(shapes: ProgramShapes) -> str:
    """Placement on the mesh: parameters, and the pages of one layer per stage."""
    import jax

    from jaxserve.runtime.programs.program_shapes import PAGE_NAMES, PAGES, PARAMETERS
    from sharding_rules import NamedArray, placement

    params = jax.tree.map(
        lambda spec: NamedArray(spec.shape, shapes.dtype, spec.axes), shapes.specs
    )
    kv = [
        {
            "k": NamedArray(layer.k.shape, layer.k.dtype, PAGE_NAMES.k),
            "v": NamedArray(layer.v.shape, layer.v.dtype, PAGE_NAMES.v),
        }
        for layer in shapes.abstract_kv
    ]
    return str(placement(params | {"kv": kv}, shapes.mesh, PARAMETERS | PAGES))


def _summary(programs: Programs) -> str:
    """How many programs there are, where they are from, and which needs the most memory."""
    from_cache = sum(program.from_cache for program in programs.values())
    largest = _by_scratch(programs)[0]
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


def _list(programs: Programs) -> str:
    rows = [("PROGRAMS", "scratch", "results", "from")]
    rows += [
        (
            program.name,
            size(program.temp_bytes),
            size(program.output_bytes),
            "cache" if program.from_cache else "compiler",
        )
        for program in _by_scratch(programs)
    ]
    return table(rows)


def _by_scratch(programs: Programs) -> list[Program]:
    return sorted(programs.values(), key=lambda program: -program.temp_bytes)


def _document(decided: EnginePlan, programs: Programs) -> dict[str, Any]:
    """What --json prints. Of the memory, `host` and `disk` are in all, the rest on each device."""
    memory = decided.memory
    sizes = ("weights", "kv", "state", "scratch", "staging", "host", "disk", "total", "limit")
    settings = dataclasses.asdict(decided.config) | {"model": str(decided.checkpoint.path)}
    return {
        "architecture": decided.shapes.model.architecture,
        "format": decided.checkpoint.format,
        "device": device_name(decided.device),
        "num_devices": memory.num_devices,
        "settings": settings,
        "memory_bytes": {name: getattr(memory, f"{name}_bytes") for name in sizes},
        "kv_pool": {
            "pages": memory.num_pages,
            "page_size": memory.page_size,
            "tokens": memory.kv_tokens,
            "groups": [dataclasses.asdict(group) for group in memory.layout.groups],
            "most_bytes": _pages_that_fit(memory) * memory.page_bytes,
        },
        "requests_at_once": [
            {"tokens": length, "requests": number} for length, number in _at_once(decided)
        ],
        "programs": [
            {
                "name": program.name,
                "scratch_bytes": program.temp_bytes,
                "result_bytes": program.output_bytes,
                "from_cache": program.from_cache,
            }
            for program in _by_scratch(programs)
        ],
    }
