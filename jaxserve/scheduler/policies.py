"""Six published schedulers as settings of one procedure (`scheduler.py`)."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Policy:
    """Four independent choices.

    joins: whether waiting sequences may join a running batch, or only form the next one when the
        engine is idle.
    pages: "reserve" allocates pages for the prompt and for max_tokens on admission, and so never
        preempts; "grow" allocates them for the prompt only, adds one page at a time, and preempts
        the last sequence when no page is available.
    prefill: "alone" runs prefill-only steps whenever there is a prefill to run; "mixed" adds
        prefills to a step that already has all decodes.
    chunk: "whole" splits a prompt only when it is larger than a step; "budget" also splits it to
        fill the token budget, but never into chunks below the floor; "exact" fills the budget to
        the last token, splitting two prompts where one chunk would be below the floor; "timed"
        makes chunks as large as the predicted step time allows, most urgent prompts first
        (`slack.py`); all others run prefills in progress first, then waiting prompts.
    """

    joins: bool
    pages: Literal["reserve", "grow"]
    prefill: Literal["alone", "mixed"]
    chunk: Literal["whole", "budget", "exact", "timed"]


POLICIES: dict[str, Policy] = {
    # Request-level batching, as servers did before Orca.
    "static": Policy(joins=False, pages="reserve", prefill="alone", chunk="whole"),
    # Orca (Yu et al., OSDI 2022): iteration-level scheduling, memory reserved up front.
    "orca": Policy(joins=True, pages="reserve", prefill="mixed", chunk="whole"),
    # vLLM (Kwon et al., SOSP 2023): paged KV, prompts before decodes.
    "vllm": Policy(joins=True, pages="grow", prefill="alone", chunk="whole"),
    # Sarathi-Serve (Agrawal et al., OSDI 2024): all decodes, then prefill chunks for the rest of
    # the token budget, so that no prefill stalls a decode. Here chunks have a minimum size.
    "sarathi": Policy(joins=True, pages="grow", prefill="mixed", chunk="budget"),
    # Dynamic SplitFuse (DeepSpeed-FastGen, 2024): also stall-free. While there are prompts, rows
    # and pages, every step prefills exactly as many tokens as the largest program takes, and so
    # runs that program. The number of decodes varies; they have separate, padded rows. This is the
    # constant dense batch of NanoFlow (2408.12757) too: its size is that of the largest program.
    "splitfuse": Policy(joins=True, pages="grow", prefill="mixed", chunk="exact"),
    # Medha, first called Mnemosyne (Agrawal et al. 2024): even step times with long prompts.
    "medha": Policy(joins=True, pages="grow", prefill="mixed", chunk="timed"),
}
