"""Six published schedulers as settings of one procedure (`scheduler.py`)."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Policy:
    """Four independent choices.

    joins: whether waiting sequences may join a running batch, or only form the next one when the
        engine is idle.
    pages: "reserve" takes pages for the prompt and every token the request may generate when it
        is admitted, and so never preempts; "grow" takes them for the prompt alone, adds one page
        at a time, and preempts the last sequence when there is none.
    prefill: "alone" runs a step of prefills and nothing else whenever there is one to run;
        "mixed" adds prefills to a step that already holds every decode.
    chunk: "whole" splits a prompt only when it is larger than a step; "budget" also splits it to
        fill the token budget, but never into pieces below the floor; "exact" fills the budget to
        the last token, splitting two prompts where one piece would fall below the floor; "timed"
        makes pieces as large as the predicted time of the step allows, of the most urgent prompts
        first (`slack.py`), where all others take those in progress, then those that wait.
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
    # Sarathi-Serve (Agrawal et al., OSDI 2024): every decode, then chunks of prompts for the rest
    # of the token budget, so that no prefill stalls a decode. Here a chunk has a floor.
    "sarathi": Policy(joins=True, pages="grow", prefill="mixed", chunk="budget"),
    # Dynamic SplitFuse (DeepSpeed-FastGen, 2024): also stall-free. As long as prompts, rows and
    # pages last, every step prefills exactly as many tokens as the largest program takes, and so
    # runs that program. Its decodes vary; they have rows of their own there, used or not.
    "splitfuse": Policy(joins=True, pages="grow", prefill="mixed", chunk="exact"),
    # Medha, first called Mnemosyne (Agrawal et al. 2024): steps of even time beside long prompts.
    "medha": Policy(joins=True, pages="grow", prefill="mixed", chunk="timed"),
}
