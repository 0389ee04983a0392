"""A world in which a test does one thing after another."""

from __future__ import annotations

from kv_world import Sample, World

PROMPT = list(range(100, 120))
OTHER = list(range(200, 220))


class Bench(World):
    """A manager, its device and its copier, driven by hand."""

    def start(self, token_ids: list[int], salt: bytes = b"") -> Sample:
        """Admits a sequence of these tokens."""
        sample = Sample(list(token_ids), salt)
        self.samples.append(sample)
        assert self.take(sample) is not None
        self.step()
        return sample

    def run(self, token_ids: list[int], salt: bytes = b"", *, partial: bool = False) -> Sample:
        """Computes all of them, and has them found by others: full pages, or what there is."""
        sample = self.start(token_ids, salt)
        self.settle()
        self.write(sample)
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
        return self.manager.match(Sample(token_ids, salt).table, len(token_ids) - 1).num_tokens
