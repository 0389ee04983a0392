"""`jaxserve plan`: memory and capacity of an engine, without running it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxserve.cli.options import ModelSettings
from jaxserve.cli.progress import TerminalProgress
from jaxserve.cli.text import device_name, size, table

if TYPE_CHECKING:
    from jaxserve.runtime.memory import MemoryPlan
    from jaxserve.runtime.programs.executables import Programs
    from jaxserve.runtime.programs.program_shapes import ProgramShapes
    from jaxserve.runtime.startup import EnginePlan


@dataclasses.dataclass(frozen=True)
class Plan:
    """Print the exact memory, capacity and programs of an engine, without reading its weights.

    For a model that does not fit, print what it needs, and settings with which it would fit.
    The programs are compiled, or loaded from the cache, because only the compiler knows how much
    scratch memory they need.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)

    def run(self) -> int:
        from jaxserve.runtime import startup

        decided = startup.decide(self.engine)
        if not decided.memory.fits:
            print(_heading(decided), _memory(decided), sep="\n\n", flush=True)
        decided = startup.accept(decided)
        with TerminalProgress() as progress:
            programs = decided.compile(progress).result()
        decided = decided.with_programs(programs)
        parts = [_heading(decided), _memory(decided), _capacity(decided)]
        if decided.shapes.mesh is not None:
            parts.append(_placement(decided.shapes))
        print(*parts, _programs(programs), sep="\n\n")
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
    """Maximum concurrent requests for each length: `max_model_len`, half of it, and so on, down to
    the length at which `max_num_seqs` of them run."""
    config, memory = decided.config, decided.memory
    rows = [("CAPACITY", ""), ("tokens in the KV pool", f"{memory.kv_tokens:,}")]
    length = config.max_model_len
    while True:
        at_once = decided.admission.num_at_once(length)
        rows.append((f"requests of {length:,} tokens at once", f"{at_once:,}"))
        if at_once == config.max_num_seqs or length <= memory.page_size:
            break
        length //= 2
    if at_once == config.max_num_seqs:
        rows.append(("most requests at once (max_num_seqs)", f"{config.max_num_seqs:,}"))
    pages = (memory.limit_bytes - memory.total_bytes) // memory.page_bytes + memory.num_pages
    rows.append(
        (
            f"largest pool that fits (kv_cache_memory_bytes {pages * memory.page_bytes})",
            f"{(pages - 1) * memory.page_size:,} tokens",
        )
    )
    return table(rows)


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


def _programs(programs: Programs) -> str:
    rows = [("PROGRAMS", "scratch", "results", "from")]
    rows += [
        (
            program.name,
            size(program.temp_bytes),
            size(program.output_bytes),
            "cache" if program.from_cache else "compiler",
        )
        for program in sorted(programs.values(), key=lambda program: -program.temp_bytes)
    ]
    return table(rows)
