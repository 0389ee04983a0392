"""A world in which a test does one thing after another."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kv_world import Sample, World

PROMPT = list(range(100, 120))
OTHER = list(range(200, 220))


class Bench(World):
    """A manager, its device and its transfer worker, driven by hand."""

    @classmethod
    def closing(cls, directory: Path, **settings) -> contextlib.closing[Bench]:
        return contextlib.closing(cls(directory, **settings))

    def start(self, token_ids: list[int], salt: bytes = b"") -> Sample:
        """Admits a sequence of these tokens."""
        sample = Sample(list(token_ids), salt)
        sample.table = self.manager.new_table(sample.known, salt)
        self.samples.append(sample)
        assert self.take(sample) is not None
        self.step()
        return sample

    def run(self, token_ids: list[int], salt: bytes = b"", *, partial: bool = False) -> Sample:
        """Computes all of them, and has them found by others: full pages, or what there is."""
        sample = self.start(token_ids, salt)
        self.settle()
        while sample.num_computed < len(sample.token_ids):
            self.write(sample, 3 * self.page_size if self.manager.windowed else None)
            self.manager.cache_pages(sample.table, sample.num_computed, partial=partial)
        return sample

    def leave(self, sample: Sample, *, pin: bool = False, keep: bool = True) -> None:
        """Releases a sequence; one that pins is to come back."""
        self.manager.release(sample.table, sample.num_computed, pin=pin, keep=keep)
        sample.running, sample.num_computed = False, 0
        if not pin:
            self.samples.remove(sample)

    def come_back(self, sample: Sample) -> None:
        assert self.take(sample) is not None
        self.step()
        self.settle()

    def hit(self, token_ids: list[int], salt: bytes = b"") -> int:
        """Tokens that a sequence would find."""
        sample = Sample(token_ids, salt)
        table = self.manager.new_table(sample.known, salt)
        return self.manager.match(table, len(token_ids) - 1).num_tokens
