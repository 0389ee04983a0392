"""Weights streamed from disk: memory that they take, bytes read, and time that steps wait for them.

    python benchmarks/streamed_weights.py [MODEL] [--dtype float32] [--tokens 24] [--staying 0 15]

Engines generate the same tokens greedily after the same prompt, one by one, and prefill a longer
prompt in a step that computes longer than it reads: with all weights on the device; streamed from
disk, with none and more layers staying; and without prefetch, through a window of one layer, which
is read only when the layer before is done. Each streamed engine runs twice: with the file in the
page cache of the operating system, and with its pages dropped before each read. The memory is what
the process gives back when the weights are freed (VmRSS of /proc).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.models.family import Params
from jaxserve.models.loading.fetch import default_model_path
from jaxserve.runtime.weights.source import ResidentWeights
from jaxserve.runtime.weights.stores import FileStore
from jaxserve.runtime.weights.streamed import StreamedWeights

PROMPT = "The history of computing begins with"
PREFILL = 448
"""Tokens of a step that computes longer than it reads."""
MIB = 1 << 20


class Case(NamedTuple):
    name: str
    staying: int | None = None
    """Layers that stay on the device; None for all."""
    window: int = 2
    cold: bool = False


class Measured(NamedTuple):
    """Steps of one kind: their mean time, and what they read. Streamed weights have a share of the
    time in which steps waited for reads."""

    step_s: float
    bytes_per_step: float | None
    stall_share: float | None


class Found(NamedTuple):
    token_ids: tuple[int, ...]
    planned_bytes: int
    resident_bytes: int
    decode: Measured
    prefill: Measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--staying", type=int, nargs="*", default=[0, 15])
    options = parser.parse_args()
    cases = [Case("device")]
    for cold in (False, True):
        of = "disk, dropped pages" if cold else "disk, page cache"
        cases += [Case(of, staying, cold=cold) for staying in options.staying]
        cases.append(Case(f"{of}, no prefetch", 0, 1, cold))
    found = {case: run(options, case) for case in cases}
    report(options, found)


def run(options: argparse.Namespace, case: Case) -> Found:
    settings: dict[str, Any] = {"max_model_len": 2 * PREFILL, "max_num_seqs": 1, "page_size": 16}
    settings |= {"dtype": options.dtype, "max_num_batched_tokens": 1 + PREFILL}
    if case.staying is not None:
        settings["weights_on"] = "disk"
        if case.staying:
            settings["resident_weight_bytes"] = budget(options.model, settings, case.staying)
    with LLM(options.model, **settings) as llm:
        state = llm.engine._runner._state
        if case.staying is not None:
            state.weights = rewired(state.weights, case)
        decodes = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        (output,) = llm.generate(PROMPT, decodes, use_tqdm=False)  # Warms up.
        token_ids = output.outputs[0].token_ids
        long = [token % 1000 + 100 for token in range(PREFILL)]
        llm.generate(long, SamplingParams(max_tokens=1), use_tqdm=False)
        decode = measured(llm, PROMPT, decodes)
        prefill = measured(llm, long, SamplingParams(temperature=0, max_tokens=1))
        planned = llm.plan().memory.weights_bytes
        return Found(token_ids, planned, freed(state), decode, prefill)


def measured(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Measured:
    """A request alone, with nothing cached."""
    llm.reset_prefix_cache()
    reads = llm.engine.counters.weight_reads
    if reads is not None:
        reads.num_passes, reads.num_bytes = 0, 0
        reads.read_s = reads.step_s = reads.stall_s = 0.0
    names = "jaxserve:device_busy_seconds_total", "jaxserve:steps_total"
    before = [llm.get_metrics()[name].value for name in names]
    llm.generate(prompt, params, use_tqdm=False)
    busy_s, steps = (llm.get_metrics()[name].value - was for name, was in zip(names, before))
    if reads is None:
        return Measured(busy_s / steps, None, None)
    return Measured(busy_s / steps, reads.bytes_per_pass, reads.stall_share)


def budget(model: Path, settings: dict[str, Any], staying: int) -> int:
    """`resident_weight_bytes` with which so many layers stay."""
    from jaxserve.core.settings.config import EngineConfig
    from jaxserve.runtime.startup import engine_plan

    placement = engine_plan.plan_engine(EngineConfig(model=model, **settings)).shapes.placement
    return placement.device_bytes + staying * max(placement.layer_bytes)


class DroppedPages:
    """A file whose pages leave the operating system's cache before each read."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def load(self, layer: int, slot: int) -> Params:
        os.posix_fadvise(self._store._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self._store.load(layer, slot)

    def close(self) -> None:
        self._store.close()


def rewired(weights: StreamedWeights, case: Case) -> StreamedWeights:
    """The same weights through the window of a case; none of them has been read yet."""
    store = DroppedPages(weights._store) if case.cold else weights._store
    return StreamedWeights(
        weights.outside_layers, weights._staying, weights._order, store, "disk", case.window
    )


def freed(state: Any) -> int:
    """Bytes of memory that the process gives back as its weights are freed."""
    weights = state.weights
    before = resident_bytes()
    if isinstance(weights, ResidentWeights):
        arrays = jax.tree.leaves(weights.params)
    else:
        arrays = jax.tree.leaves((weights.outside_layers, weights._staying))
    for array in arrays:
        array.delete()
    del arrays
    weights.close()
    return before - resident_bytes()


def resident_bytes() -> int:
    """VmRSS of this process, after what is unused was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmRSS"].split()[0]) * 1024


def report(options: argparse.Namespace, found: dict[Case, Found]) -> None:
    device = next(iter(found.values()))
    rows = []
    for case, one in found.items():
        decode, prefill = one.decode, one.prefill
        rows.append(
            (
                case.name,
                case.staying,
                one.planned_bytes / MIB,
                one.resident_bytes / MIB,
                decode.bytes_per_step and decode.bytes_per_step / MIB,
                decode.step_s / device.decode.step_s,
                decode.stall_share and 100 * decode.stall_share,
                prefill.step_s / device.prefill.step_s,
                prefill.stall_share and 100 * prefill.stall_share,
                "yes" if one.token_ids == device.token_ids else "NO",
            )
        )
    columns = ("weights", "layers staying", "planned MiB", "resident MiB", "MiB a step")
    columns += ("decode", "stall %", "prefill", "stall %", "same tokens")
    title = (
        f"{options.model.name}, {options.dtype}, {len(os.sched_getaffinity(0))} core(s). Steps as "
        f"multiples of those on the device: decode {1e3 * device.decode.step_s:.1f} ms, prefill of "
        f"{PREFILL} tokens {1e3 * device.prefill.step_s:.1f} ms"
    )
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
