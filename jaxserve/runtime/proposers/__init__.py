"""Methods of speculative decoding: each is a Proposer in a file of its own, a line here, and its
keys in core/settings/speculative.py."""

from __future__ import annotations

from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.proposers.draft_model import DraftModelProposer
from jaxserve.runtime.proposers.eagle import EagleProposer
from jaxserve.runtime.proposers.jacobi import JacobiProposer
from jaxserve.runtime.proposers.layer_skip import LayerSkipProposer
from jaxserve.runtime.proposers.medusa import MedusaProposer
from jaxserve.runtime.proposers.ngram import NgramProposer
from jaxserve.runtime.proposers.proposer import Proposer

PROPOSERS: dict[str, type[Proposer]] = {
    "ngram": NgramProposer,
    "draft_model": DraftModelProposer,
    "layer_skip": LayerSkipProposer,
    "medusa": MedusaProposer,
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
    "mtp": EagleProposer,
    "jacobi": JacobiProposer,
    "lookahead": JacobiProposer,
}


def proposer_of(shapes: ProgramShapes, set_tables: SetTables) -> Proposer | None:
    """The proposer of an engine; None without speculation. `set_tables` writes page tables."""
    config = shapes.config.speculative_config
    return None if config is None else PROPOSERS[config.method](shapes, set_tables)
