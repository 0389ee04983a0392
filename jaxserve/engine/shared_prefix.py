"""A prefix that several sequences begin with, computed by the first of them."""

from __future__ import annotations

import dataclasses

from jaxserve.engine.sequence import Sequence, Status
from jaxserve.kv.prefix_tree import Node


@dataclasses.dataclass(eq=False)
class SharedPrefix:
    """The first `num_tokens` tokens of several sequences: the prompt of a request with several
    samples, or what prompts of a list have in common (BatchLLM, Zheng et al. 2025).

    The first member to run leads: it computes the prefix while the others wait for it. Then its
    pages are held until the last member has ended.
    """

    num_tokens: int
    num_members: int = 0
    leader: Sequence | None = None
    ready: bool = False
    nodes: list[Node] = dataclasses.field(default_factory=list)

    def keeps_waiting(self, seq: Sequence) -> bool:
        """Whether `seq` would compute what another member is computing."""
        leader = self.leader
        return (
            not self.ready
            and leader is not None
            and leader is not seq
            and leader.status is Status.RUNNING
        )
