"""What decodes have read of compressed KV on the host, as plain data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RecallCounts:
    """Chunks of values, each of one KV head of a layer and of `chunk_bytes`, that decodes have
    attended to so far, and those of them that were copied from the host. The others were on the
    device, as the decode before had attended to them too."""

    chunk_bytes: int
    attended: int = 0
    copied: int = 0

    @property
    def copied_share(self) -> float:
        """Share of the chunks that were copied, 0..1."""
        return self.copied / max(1, self.attended)
