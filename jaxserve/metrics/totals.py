"""What an engine has counted since its start, and the names under which metrics export it.

Metric names of vLLM have the same meaning here; as in vLLM, each sequence counts as one request.
"""

from __future__ import annotations

from jaxserve.metrics.metric import Metric, counter, gauge, histogram
from jaxserve.metrics.statistics import Histogram
from jaxserve.metrics.summaries import NO_DRAFTS

SECOND_US = 1_000_000


def _bounds_us(*milliseconds: int) -> tuple[int, ...]:
    return tuple(ms * 1_000 for ms in milliseconds)


# The bucket bounds of vLLM's histograms, so that its dashboards work here.
# fmt: off
_TTFT_BOUNDS_US = _bounds_us(
    1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000,
    40_000, 80_000, 160_000, 640_000, 2_560_000,
)
_INTER_TOKEN_BOUNDS_US = _bounds_us(
    10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000,
    40_000, 80_000,
)
_E2E_BOUNDS_US = _bounds_us(
    300, 500, 800, 1_000, 1_500, 2_000, 2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000,
    50_000, 60_000, 120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000,
)
# fmt: on
_N_BOUNDS = (1, 2, 5, 10, 20)
_PREEMPTIONS_BOUNDS = (0, 1, 2, 5, 10, 20)
_STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM ends these at the context limit, which the event log does not know.
_TOKENS_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_FLUIDITY_BOUNDS_PERCENT = (10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


class Totals:
    """Counters and histograms; `Metrics` counts in them."""

    def __init__(self) -> None:
        self.ended_by_reason = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.running = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.drafts = NO_DRAFTS
        self.accepted_by_position: dict[str, int] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.ttft = Histogram(_TTFT_BOUNDS_US, SECOND_US)
        self.inter_token = Histogram(_INTER_TOKEN_BOUNDS_US, SECOND_US)
        self.e2e = Histogram(_E2E_BOUNDS_US, SECOND_US)
        self.queue = Histogram(_E2E_BOUNDS_US, SECOND_US)
        self.prefill = Histogram(_E2E_BOUNDS_US, SECOND_US)
        self.decode = Histogram(_E2E_BOUNDS_US, SECOND_US)
        self.inference = Histogram(_E2E_BOUNDS_US, SECOND_US)
        self.mean_inter_token = Histogram(_INTER_TOKEN_BOUNDS_US, SECOND_US)
        self.request_prompt = Histogram(_TOKENS_BOUNDS, 1)
        self.request_computed = Histogram(_TOKENS_BOUNDS, 1)
        self.request_output = Histogram(_TOKENS_BOUNDS, 1)
        self.request_preemptions = Histogram(_PREEMPTIONS_BOUNDS, 1)
        self.max_tokens = Histogram(_TOKENS_BOUNDS, 1)
        self.n = Histogram(_N_BOUNDS, 1)
        self.step_tokens = Histogram(_STEP_TOKENS_BOUNDS, 1)
        self.fluidity = Histogram(_FLUIDITY_BOUNDS_PERCENT, 100)
        self.token_deadlines = {"met": 0, "missed": 0}
        self.steps = 0
        self.prefill_tokens = 0
        self.padded_tokens = 0
        self.prefix_kv_bytes = {"once": 0, "alone": 0}
        self.host_us = {"schedule": 0, "pack": 0, "dispatch": 0, "wait": 0}
        self.first_call_us: int | None = None
        self.last_ready_us = 0
        self.device_busy_us = 0
        self.transferred_bytes: dict[str, int] = {}  # by direction
        self.transfer_us: dict[str, int] = {}
        self.startup_us: dict[str, int] = {}
        self.programs_compiled = 0

    def vllm_metrics(self, waiting: int) -> dict[str, Metric]:
        """The metrics that vLLM has too, by exported name; `waiting`: sequences that wait."""
        metrics = {
            "num_requests_running": gauge("Running sequences", self.running),
            "num_requests_waiting": gauge("Waiting sequences, preempted ones included", waiting),
            "num_requests_waiting_by_reason": gauge(
                "Waiting sequences, all of them for room in a step or the KV cache",
                {"capacity": waiting},
                "reason",
            ),
            "num_preemptions_total": counter("Preemptions", self.preemptions),
            "prompt_tokens_total": counter("Prompt tokens prefilled", self.prompt_tokens),
            "generation_tokens_total": counter("Tokens generated", self.output_tokens),
            "prefix_cache_queries_total": counter(
                "Prompt tokens looked up in the prefix cache", self.prefix_queries
            ),
            "prefix_cache_hits_total": counter(
                "Prompt tokens found in the prefix cache", self.prefix_hits
            ),
            "spec_decode_num_drafts_total": counter("Drafts verified", self.drafts.num_drafts),
            "spec_decode_num_draft_tokens_total": counter(
                "Draft tokens verified", self.drafts.num_draft_tokens
            ),
            "spec_decode_num_accepted_tokens_total": counter(
                "Draft tokens accepted", self.drafts.num_accepted_tokens
            ),
            "spec_decode_num_accepted_tokens_per_pos_total": counter(
                "Draft tokens accepted, by place in their draft",
                dict(self.accepted_by_position),
                "position",
            ),
            "request_success_total": counter(
                "Sequences ended", dict(self.ended_by_reason), "finished_reason"
            ),
            "time_to_first_token_seconds": histogram("Arrival to first token", self.ttft.value()),
            "inter_token_latency_seconds": histogram(
                "Time between steps with tokens of a sequence", self.inter_token.value()
            ),
            "e2e_request_latency_seconds": histogram(
                "Arrival to finish, of completed sequences", self.e2e.value()
            ),
            "request_queue_time_seconds": histogram(
                "Arrival to first step, of completed sequences", self.queue.value()
            ),
            "request_prefill_time_seconds": histogram(
                "First step to first token, of completed sequences", self.prefill.value()
            ),
            "request_decode_time_seconds": histogram(
                "First to last token, of completed sequences", self.decode.value()
            ),
            "request_inference_time_seconds": histogram(
                "First step to last token, of completed sequences", self.inference.value()
            ),
            "request_time_per_output_token_seconds": histogram(
                "Mean time between tokens, of completed sequences", self.mean_inter_token.value()
            ),
            "request_prompt_tokens": histogram(
                "Prompt tokens of completed sequences", self.request_prompt.value()
            ),
            "request_prefill_kv_computed_tokens": histogram(
                "Prompt tokens not found in the prefix cache, of completed sequences",
                self.request_computed.value(),
            ),
            "request_generation_tokens": histogram(
                "Tokens generated, of completed sequences", self.request_output.value()
            ),
            "request_num_preemptions": histogram(
                "Preemptions, of completed sequences", self.request_preemptions.value()
            ),
            "request_params_max_tokens": histogram(
                "max_tokens of arrived sequences that set it", self.max_tokens.value()
            ),
            "request_params_n": histogram("n of arrived requests", self.n.value()),
            "iteration_tokens_total": histogram(
                "Output tokens of a step, with the prompts that it completed",
                self.step_tokens.value(),
            ),
        }
        return {f"vllm:{name}": metric for name, metric in metrics.items()}

    def own_metrics(self, now_us: int) -> dict[str, Metric]:
        """The others, at `now_us` on the log's clock."""
        host_s = {part: us / SECOND_US for part, us in self.host_us.items()}
        startup_s = {name: us / SECOND_US for name, us in self.startup_us.items()}
        move_s = {way: us / SECOND_US for way, us in self.transfer_us.items()}
        busy_s = self.device_busy_us / SECOND_US
        metrics = {
            "fluidity_index": histogram(
                "Fluidity index of completed sequences, 0..1", self.fluidity.value()
            ),
            "token_deadlines_total": counter(
                "Token deadlines of completed sequences", dict(self.token_deadlines), "outcome"
            ),
            "steps_total": counter("Steps collected", self.steps),
            "prefill_tokens_total": counter(
                "Tokens computed in chunks, also again after a preemption", self.prefill_tokens
            ),
            "padded_tokens_total": counter("Padding rows computed", self.padded_tokens),
            "prefix_kv_bytes_total": counter(
                "KV of pages that groups of decodes share: read, once a group, and as it would be "
                "if every decode read it alone",
                dict(self.prefix_kv_bytes),
                "read",
            ),
            "host_seconds_total": counter("Host time of steps", host_s, "part"),
            "device_busy_seconds_total": counter("Time with a step on the device", busy_s),
            "device_busy_share": gauge(
                "Share of time with a step on the device, from the first until now",
                self._busy_share(now_us),
            ),
            "kv_transferred_bytes_total": counter(
                "Bytes of KV transferred", dict(self.transferred_bytes), "direction"
            ),
            "kv_transfer_seconds_total": counter("Time of KV transfers", move_s, "direction"),
            "programs_compiled_total": counter("Programs compiled", self.programs_compiled),
            "startup_seconds": gauge("Time spent in each phase of startup", startup_s, "phase"),
        }
        return {f"jaxserve:{name}": metric for name, metric in metrics.items()}

    def _busy_share(self, now_us: int) -> float:
        if not self.steps:
            return 0.0
        return self.device_busy_us / max(1, now_us - self.first_call_us)
