"""Groups of decodes that share their first pages, which a step then reads once a group.

Sequences share pages after a prefix hit: samples of one request, beams, prompts with a common
beginning. There is one level of groups: a decode is in at most one.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from jaxserve.core.steps.plan import DecodeGroup, ScheduledChunk

MAX_LEVELS = 6
"""Branches one below another at which a group may be split; a tree of prompts has few."""

_start = attrgetter("start")
_Rows = tuple[int, ...]
_Groups = list[tuple[_Rows, int]]
"""Rows and the number of pages that they share."""


@dataclasses.dataclass(frozen=True)
class PrefixCost:
    """What attention to a shared prefix costs in a layer, where a decode that reads one token's KV
    for itself costs 1.

    Attributes:
        once: of a token for a group, which reads it.
        in_group: of a token for each decode of a group: the products.
        row: of a decode in a group, whose two results are merged.
        group: of a group.
        token_bytes: of one token's KV in all layers whose attention is shared, on all devices.
    """

    once: float
    in_group: float
    row: float
    group: float
    token_bytes: int = 0

    def gain(self, num_decodes: int, num_tokens: int) -> float:
        """What a group saves; negative if it does not pay."""
        return num_decodes * self.of_decode(num_tokens) - self.of_group(num_tokens)

    def of_decode(self, num_tokens: int) -> float:
        """What each decode of a group saves."""
        return num_tokens * (1 - self.in_group) - self.row

    def of_group(self, num_tokens: int) -> float:
        """What a group costs, whatever its decodes."""
        return num_tokens * self.once + self.group


def group_decodes(
    decodes: SequenceOf[ScheduledChunk], page_size: int, cost: PrefixCost
) -> tuple[list[ScheduledChunk], tuple[DecodeGroup, ...]]:
    """The decodes in the order to compute them, and the groups that pay: their decodes are
    neighbours, longest context first, before those in none. A group shares only pages that are full
    of tokens before the newest of each of its decodes."""
    firsts = [chunk.pages[0] for chunk in decodes if chunk.start >= page_size]
    if len({*firsts}) == len(firsts):  # As in most steps: none shares a page with another.
        return [*decodes], ()
    if cost.gain(len(decodes), max(chunk.start for chunk in decodes)) <= 0:
        return [*decodes], ()
    prefixes = [chunk.pages[: chunk.start // page_size] for chunk in decodes]
    ordered: list[ScheduledChunk] = []
    groups = []
    for rows, num_pages in sorted(_grouped(prefixes, page_size, cost), key=lambda group: -group[1]):
        groups.append(DecodeGroup(len(ordered), len(rows), num_pages))
        ordered += sorted((decodes[row] for row in rows), key=_start, reverse=True)
    taken = {chunk.slot for chunk in ordered}
    return ordered + [chunk for chunk in decodes if chunk.slot not in taken], tuple(groups)


def _grouped(prefixes: SequenceOf[SequenceOf[int]], page_size: int, cost: PrefixCost) -> _Groups:
    """The groups of the greatest gain together, but for splits below MAX_LEVELS others: the best
    choice of where in the tree of prefixes groups begin, each row being in the deepest above it."""

    @functools.cache
    def split(rows: _Rows, level: int) -> tuple[int, list[_Rows], _Rows]:
        """The pages that rows share, the branches after these, and the rows in no branch."""
        shared = _num_common([prefixes[row] for row in rows])
        branches = _by_page(prefixes, rows, shared) if level < MAX_LEVELS else []
        branched = {row for branch in branches for row in branch}
        return shared, branches, tuple(row for row in rows if row not in branched)

    @functools.cache  # What rows gain in a group above is one of a few numbers, one for each.
    def best(rows: _Rows, level: int, worth: float) -> tuple[float, _Groups, _Rows]:
        """Of rows that begin with the same pages, each of which gains `worth` in a group of fewer
        pages: the gain, groups of more pages, and the rows in none of them."""
        shared, branches, alone = split(rows, level)

        def below(worth: float) -> tuple[float, _Groups, _Rows]:
            gain, groups, rest = worth * len(alone), [], alone
            for branch in branches:
                more, found, others = best(branch, level + 1, worth)
                gain, groups, rest = gain + more, groups + found, rest + others
            return gain, groups, rest

        gain, groups, rest = below(worth)
        deeper = cost.of_decode(shared * page_size)
        if deeper > worth:
            together, found, others = below(deeper)
            together -= cost.of_group(shared * page_size)
            if together > gain:
                return together, [(others, shared), *found], ()
        return gain, groups, rest

    roots = _by_page(prefixes, range(len(prefixes)), 0)
    return [group for rows in roots for group in best(rows, 0, 0.0)[1]]


def _by_page(
    prefixes: SequenceOf[SequenceOf[int]], rows: SequenceOf[int], index: int
) -> list[_Rows]:
    """Rows with the same page at `index`, where there are several."""
    found: dict[int, list[int]] = {}
    for row in rows:
        if index < len(prefixes[row]):
            found.setdefault(prefixes[row][index], []).append(row)
    return [tuple(same) for same in found.values() if len(same) > 1]


def _num_common(prefixes: SequenceOf[SequenceOf[int]]) -> int:
    """How many pages all begin with: those of the first and the last in order of pages."""
    first, last = min(prefixes), max(prefixes)
    lengths = range(1, min(len(first), len(last)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != last[:length])
