"""`jaxserve batch --offload auto`: the settings of the fastest policy, from measured rates."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from typing import TYPE_CHECKING, Any

from jaxserve.cli.arguments.options import EngineOptions, load
from jaxserve.cli.terminal.text import size
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.cache_dir import cache_directory
from jaxserve.core.process.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxserve.core.settings.chat_settings import ChatSettings
    from jaxserve.llm import LLM
    from jaxserve.offline.job import BatchJob
    from jaxserve.offline.offload_policy import Lengths, OffloadPolicy, Problem
    from jaxserve.runtime.startup.engine_plan import EnginePlan

_LINES = 64
"""Lines of the job whose lengths count."""
_MOST_SEQUENCES = 4096
"""Of a longer job; how it ends matters less."""
_MAX_ROWS = 16
_MAX_STEPS = 16


@dataclasses.dataclass(frozen=True)
class ChosenOffload:
    """Settings of an engine, and the policy that they carry out, with its modelled time."""

    engine: EngineOptions
    policy: OffloadPolicy
    problem: Problem

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, as modelled."""
        return 1 / self.policy.token_s

    def tokens_per_s_of(self, prompt_tokens: int, outputs: Sequence[int]) -> float:
        """The same for a job with these lengths, in place of those that were expected: with so many
        tokens in all prompts, and these in the answers."""
        from jaxserve.offline.offload_policy import Lengths

        problem = dataclasses.replace(self.problem, lengths=Lengths.of(prompt_tokens, outputs))
        policy = self.policy
        return 1 / problem.seconds(policy.rows, policy.steps, policy.shares)

    def __str__(self) -> str:
        shares = {
            name: ", ".join(
                f"{self.policy.shares[kind, tier]:.0%} on {tier}"
                for tier in ("device", "host", "disk")
                if self.policy.shares[kind, tier] > 1e-6
            )
            for kind, name in (("weights", "layers"), ("kv", "KV"), ("activations", "activations"))
        }
        rates = self.problem.rates
        decodes = rates.decode_s.items()
        return table(
            [
                ("OFFLOAD", ""),
                *shares.items(),
                ("sequences in a step", f"{self.policy.rows}"),
                ("steps to a read of the layers", f"{self.policy.steps}"),
                ("modelled output tokens/s", f"{self.tokens_per_s:,.1f}"),
                ("mean tokens of prompts", f"{self.problem.lengths.prompt:,.0f}"),
                ("mean tokens of answers, at most", f"{self.problem.lengths.output:,.0f}"),
                ("measured: reads", f"{size(rates.disk_to_host)}/s"),
                *((f"measured: a decode of {n}", f"{1e3 * s:,.1f} ms") for n, s in decodes),
                ("measured: prefill of a token", f"{1e3 * rates.prefill_s:,.2f} ms"),
                ("measured: computing lost to reads", f"{rates.contention:.0%}"),
            ]
        )


def choose(
    engine: EngineOptions, job: BatchJob, names: tuple[str, ...], chat: ChatSettings
) -> ChosenOffload:
    """Measure this machine with an engine that streams its layers, and solve for the policy.

    Raises ConfigError for settings that the policy is to decide, and when nothing fits.
    """
    for name in ("weights_on", "kv_on", "resident_weight_bytes", "resident_kv_tokens"):
        given = getattr(engine, name)
        if given not in (None, "device"):
            raise ConfigError(
                f"offload is 'auto', which decides {name}, but that is {given!r}; leave one of "
                "them out."
            )
    rows = _sizes(min(_MAX_ROWS, engine.max_num_seqs or _MAX_ROWS))
    with load(_measured(engine, rows[-1])) as llm:
        plan = llm.plan()
        kv_on_host = _may_keep_kv_on_host(plan)
        problem = _problem(llm, job, names, chat, rows, kv_on_host)
    return fastest(engine, problem, kv_on_host)


def _measured(engine: EngineOptions, max_num_seqs: int) -> EngineOptions:
    """Settings of an engine whose decodes are of one token of each sequence, and whose prefills
    fill their steps. Raises ConfigError for what excludes `weights_on`."""
    on_disk = dataclasses.replace(engine, weights_on="disk", max_num_seqs=max_num_seqs)
    return dataclasses.replace(
        on_disk, speculative_config=None, scheduler="sarathi", target_step_us=None
    )


def _sizes(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _block_sizes(engine: EngineOptions) -> list[int]:
    """Numbers of steps to a read of the layers that the other settings allow."""
    try:
        dataclasses.replace(engine, weights_on="disk", steps_per_weight_read=_MAX_STEPS)
    except ConfigError:
        return [1]
    return _sizes(_MAX_STEPS)


def fastest(engine: EngineOptions, problem: Problem, kv_on_host: bool = True) -> ChosenOffload:
    """The settings of the fastest policy that fit, with a number of sequences in a step that was
    measured. `kv_on_host`: whether the model's KV may be there.

    State and programs of an engine grow with its sequences, and pages are whole, which the problem
    does not know: what the plan of the settings needs beyond the memory is added to its work.
    Raises ConfigError when nothing fits.
    """
    from jaxserve.runtime.startup import engine_plan

    never, rows = _never(engine, problem, kv_on_host), [*problem.rates.decode_s]
    steps = _block_sizes(engine)
    while True:
        chosen = carried_out(engine, problem, problem.best(rows, steps, never))
        memory = engine_plan.decide(chosen.engine).memory
        if memory.fits:
            return chosen
        missing = memory.kv_bytes - memory.room_bytes
        problem = dataclasses.replace(problem, work_bytes=problem.work_bytes + missing)


def _problem(
    llm: LLM,
    job: BatchJob,
    names: tuple[str, ...],
    chat: ChatSettings,
    rows: Sequence[int],
    kv_on_host: bool,
) -> Problem:
    from jaxserve.cli.planning import step_rates
    from jaxserve.offline.offload_policy import MemoryCapacity, ModelBytes, PolicyRates, Problem
    from jaxserve.runtime.hardware import link_rates
    from jaxserve.runtime.hardware.device_memory import host_memory
    from jaxserve.runtime.programs.shapes.host_kv import HostKVShapes
    from jaxserve.runtime.startup.loading import layer_file

    plan, lengths = llm.plan(), _lengths(llm, job, names, chat)
    shapes, memory, config = plan.shapes, plan.memory, plan.config
    placement = shapes.placement
    if not placement.streamed:
        raise ConfigError(
            f"offload is 'auto', but the model has only {len(placement.layer_bytes)} layers, which "
            "a window of two holds; leave offload out."
        )
    prefill_tokens = shapes.buckets.prefill_tokens

    def longest(count: int) -> int:
        in_pool = (memory.num_pages - 2) // count * config.page_size
        room = min(config.max_model_len, in_pool)
        return step_rates.longest_context(count, prefill_tokens[-1], room)

    rows = [count for count in rows if longest(count) >= step_rates.LEAST_CONTEXT] or [1]
    context = max(1, min(round(lengths.prompt + lengths.output / 2), longest(rows[-1])))
    steps = step_rates.measure(llm.engine, rows, context)
    links = link_rates.measure(plan.device, layer_file(plan.checkpoint, shapes).path.parent)
    host_kv = None
    if not memory.host_is_device and kv_on_host:
        sizes = shapes.layouts, shapes.kv, 1, plan.device
        host_kv = HostKVShapes(config, shapes.model, *sizes).attention.seconds
    return Problem(
        ModelBytes(
            layers=len(placement.layer_bytes),
            layer=max(placement.layer_bytes),
            outside=placement.outside_bytes,
            kv_token=memory.page_bytes // config.page_size,
            activation_token=shapes.model.hidden_size * shapes.dtype.itemsize,
        ),
        PolicyRates(**steps._asdict(), **links._asdict()),
        lengths,
        MemoryCapacity(
            device=memory.limit_bytes,
            host=0 if memory.host_is_device else host_memory(),
            disk=_free_on_disk() + memory.disk_weights_bytes,
        ),
        work_bytes=memory.state_bytes + memory.scratch_bytes,
        prefill_tokens=prefill_tokens,
        host_kv=host_kv,
    )


def _lengths(llm: LLM, job: BatchJob, names: tuple[str, ...], chat: ChatSettings) -> Lengths:
    """Those of the first lines, again and again until there are as many as in the job. Of answers
    they are the most that may be generated."""
    from jaxserve.offline.offload_policy import Lengths
    from jaxserve.offline.windows import lengths

    found = lengths(job, llm.engine, _LINES, names, chat)
    if not found:
        raise ConfigError(
            f"offload is 'auto', but none of the first {_LINES} lines is valid, so that nothing is "
            "known of their lengths; leave offload out."
        )
    count = len(found) * job.num_left() // min(_LINES, len(job.lines))
    some = [*itertools.islice(itertools.cycle(found), max(1, min(count, _MOST_SEQUENCES)))]
    return Lengths.of(sum(prompt for prompt, _ in some), [output for _, output in some])


def _may_keep_kv_on_host(plan: EnginePlan) -> bool:
    """Whether KV of this model may be on the host, whatever the number of steps in a block, and its
    time there can be measured."""
    from jaxserve.runtime.hardware.host_cpu import host_device
    from jaxserve.runtime.startup.engine_plan import check_host_kv

    try:
        config = dataclasses.replace(plan.config, kv_on="host", steps_per_weight_read=_MAX_STEPS)
        check_host_kv(config, plan.shapes.model, plan.shapes.kv_layout)
    except ConfigError:
        return False
    return host_device() is not None


def _never(engine: EngineOptions, problem: Problem, kv_on_host: bool) -> set[tuple[str, str]]:
    """Places that this engine cannot use."""
    never = {("activations", "host"), ("activations", "disk"), ("kv", "disk")}
    if not problem.capacity.host:
        never |= {("weights", "host"), ("kv", "host")}
    else:
        never.add(("weights", "disk"))  # Layers are read from one place.
    try:
        dataclasses.replace(engine, kv_on="host")
    except ConfigError:
        kv_on_host = False
    if not kv_on_host:
        never.add(("kv", "host"))
    return never


def carried_out(engine: EngineOptions, problem: Problem, policy: OffloadPolicy) -> ChosenOffload:
    """The settings nearest to a policy that hold no more: layers are whole, and pages too."""
    from jaxserve.offline.offload_policy import TIERS

    model, shares = problem.model, dict(policy.shares)
    changes: dict[str, Any] = {"max_num_seqs": policy.rows * policy.steps}
    staying = int(shares["weights", "device"] * model.layers + 1e-6)
    below = "host" if shares["weights", "host"] > shares["weights", "disk"] else "disk"
    if staying + problem.window < model.layers:
        budget = (staying + problem.window) * model.layer + model.outside
        changes |= {
            "weights_on": below,
            "resident_weight_bytes": budget,
            "steps_per_weight_read": policy.steps,
        }
        for tier in TIERS:
            shares["weights", tier] = 0.0
        shares["weights", "device"] = staying / model.layers
        shares["weights", below] = 1 - staying / model.layers
    if shares["kv", "device"] < 1 - 1e-6:
        tokens = problem.lengths.prompt + problem.lengths.output
        changes |= {
            "kv_on": "host",
            "resident_kv_tokens": max(1, int(shares["kv", "device"] * tokens)),
        }
    rounded = dataclasses.replace(
        policy, shares=shares, token_s=problem.seconds(policy.rows, policy.steps, shares)
    )
    return ChosenOffload(dataclasses.replace(engine, **changes), rounded, problem)


def _free_on_disk() -> int:
    return shutil.disk_usage(cache_directory()).free
