"""What drafts for a model: its checkpoint, and its parameters on a mesh."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from jaxserve.core.errors import ModelError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.drafters import mtp
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.drafters import mtp as mtp_layer
from jaxserve.models.loading.drafters.eagle import EagleCheckpoint
from jaxserve.models.loading.drafters.eagle3 import Eagle3Checkpoint
from jaxserve.models.loading.drafters.medusa import MedusaCheckpoint
from jaxserve.models.loading.drafters.methods import check_method
from jaxserve.runtime.programs.shapes.params import partitioned
from jaxserve.runtime.programs.shapes.program import DraftModel
from jaxserve.runtime.proposers.draft_model import check_draft_model
from jaxserve.runtime.proposers.eagle import check_draft_layer
from jaxserve.runtime.proposers.medusa import check_heads


def open_drafter(
    config: EngineConfig, checkpoint: Checkpoint, load_format: str
) -> Checkpoint | MedusaCheckpoint | None:
    """The model, the layer or the heads that draft for a resolved config; None without.

    Raises ModelError when they cannot be opened, ConfigError when they do not fit the target.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "mtp":
        mtp_layer.check(checkpoint)
        return checkpoint
    if speculative is None or speculative.model is None:
        return None
    model, method = speculative.model, speculative.method
    try:
        check_method(model, method)
        draft: Checkpoint | MedusaCheckpoint
        if method == "medusa":
            draft = MedusaCheckpoint.open(model)
        elif method == "eagle":
            draft = EagleCheckpoint.open(model)
        elif method == "eagle3":
            draft = Eagle3Checkpoint.open(model)
        else:
            draft = open_checkpoint(model, load_format, seed=config.seed)
    except ModelError as error:
        raise type(error)(f"the model of speculative_config: {error}") from error
    if isinstance(draft, MedusaCheckpoint):
        check_heads(draft.config, checkpoint.config, speculative)
    elif isinstance(draft, EagleCheckpoint):
        draft.feature_layer(checkpoint.config)
        check_draft_layer(draft.config, checkpoint.config, config.max_model_len)
    else:
        check_draft_model(draft.config, checkpoint.config, config.max_model_len)
    return draft


def drafting_layers(
    checkpoint: Checkpoint, draft_checkpoint: Checkpoint | MedusaCheckpoint | None
) -> ModelConfig | None:
    """The config, before it is partitioned, of the layers that draft and have KV of their own; None
    without such."""
    if draft_checkpoint is None or isinstance(draft_checkpoint, MedusaCheckpoint):
        return None
    if draft_checkpoint is checkpoint:
        return mtp.layer_of(checkpoint.config)
    return draft_checkpoint.config


def drafting(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft_checkpoint: Checkpoint | MedusaCheckpoint | None,
    mesh: Mesh | AbstractMesh | None,
) -> tuple[DraftModel | None, MedusaConfig | None]:
    """The model or the layer that drafts, or the heads, partitioned for a mesh."""
    draft = medusa = None
    if isinstance(draft_checkpoint, MedusaCheckpoint):
        medusa = draft_checkpoint.config
    elif isinstance(draft_checkpoint, EagleCheckpoint):
        layer = draft_checkpoint.feature_layer(checkpoint.config)
        parts = partitioned(config, draft_checkpoint, mesh, None, draft_checkpoint.specs)
        draft = DraftModel(parts[0], layer.family, parts[2], layer)
    elif draft_checkpoint is checkpoint:
        target, method = checkpoint.config, config.quantization
        whole, layer = mtp.param_specs(target), mtp.layer_of(target)
        parts = partitioned(config, checkpoint, mesh, method, whole, layer)
        draft = DraftModel(*parts, mtp.feature_layer(target))
    elif draft_checkpoint is not None:
        stored = draft_checkpoint.quantization
        draft = DraftModel(*partitioned(config, draft_checkpoint, mesh, stored))
    return draft, medusa
