"""What a server's metrics count of speculative decoding, under vLLM's names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jaxserve.core.process.extras import extra

with extra("loadgen"):
    import aiohttp

_NAME = "vllm:spec_decode_num_"
_LINE = re.compile(rf"{_NAME}(\w+?)(?:_total)?(?:\{{(.*)\}})? ([0-9.eE+]+)(?: \d+)?")
_POSITION = re.compile(r'position="(\d+)"')


@dataclasses.dataclass(frozen=True)
class ServerDraftCounts:
    """Drafts that steps verified, each of one sequence, their tokens, and those accepted; also by
    the position in the draft, from 0."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...] = ()

    def since(self, before: ServerDraftCounts) -> ServerDraftCounts:
        """What was counted after `before`."""
        places = (*before.accepted_by_position, *[0] * len(self.accepted_by_position))
        return ServerDraftCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_by_position, places)),
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Rows of a table; no more than the first when nothing was drafted."""
        yield "drafts", f"{self.drafts:,}"
        if not self.drafts:
            return
        yield "draft tokens", f"{self.draft_tokens:,}"
        share = self.accepted_tokens / max(1, self.draft_tokens)
        yield "of which accepted", f"{self.accepted_tokens:,} ({share:.1%})"
        yield "tokens a drafted step", f"{1 + self.accepted_tokens / self.drafts:.2f}"
        for place, count in enumerate(self.accepted_by_position, 1):
            yield f"drafts accepted up to position {place}", f"{count / self.drafts:.1%}"


async def draft_counts(http: aiohttp.ClientSession, base_url: str) -> ServerDraftCounts | None:
    """Those since the server at `base_url` began, of all its replicas; None where its /metrics is
    missing or has no such counts."""
    url = base_url.removesuffix("/v1") + "/metrics"
    try:
        async with http.get(url) as response:
            if response.status != 200:
                return None
            return parsed(await response.text())
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return None


def parsed(text: str) -> ServerDraftCounts | None:
    """The counts in metrics in Prometheus's text format; None without any."""
    sums: dict[str, int] = {}
    places: dict[int, int] = {}
    for line in text.splitlines():
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        name, labels, value = found.groups()
        if name == "accepted_tokens_per_pos":
            position = _POSITION.search(labels or "")
            if position is not None:
                place = int(position[1])
                places[place] = places.get(place, 0) + round(float(value))
        else:
            sums[name] = sums.get(name, 0) + round(float(value))
    if "drafts" not in sums:
        return None
    return ServerDraftCounts(
        sums["drafts"],
        sums.get("draft_tokens", 0),
        sums.get("accepted_tokens", 0),
        tuple(places.get(place, 0) for place in range(1 + max(places, default=-1))),
    )
