"""Which method of speculation a directory is for, so that another `method` is refused by name, not
for the tensors that it lacks."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from jaxserve.core.errors import ConfigError, ModelError
from jaxserve.core.model_files import check_regular, read_json
from jaxserve.models.loading.directory import CONFIG
from jaxserve.models.loading.drafters.eagle import is_eagle3
from jaxserve.models.loading.drafters.medusa import MODEL_TYPE

_HOLDS = {
    "draft_model": "a whole model",
    "medusa": "Medusa heads",
    "eagle": "an EAGLE draft layer",
    "eagle3": "an EAGLE-3 draft layer",
}
"""What a directory for a method holds."""


def check_method(model: str, method: str) -> None:
    """Raises ConfigError when the directory `model` of speculative_config is for another method
    than `method`, ModelError when its config.json cannot be read. What is no directory, or cannot
    be told, passes."""
    found = _method_of(Path(model).expanduser())
    if found is None or found == method:
        return
    raise ConfigError(
        f"the model of speculative_config is {model!r}, which holds {_HOLDS[found]}, but the "
        f'method {method!r} needs {_HOLDS[method]}; set "method" to "{found}", or "model" to '
        f"{_HOLDS[method]}."
    )


def _method_of(path: Path) -> str | None:
    """The method that a directory is for, by its config.json and the names of its tensors; None
    where these do not say it."""
    if not (path / CONFIG).is_file():
        return None
    raw = read_json(path / CONFIG)
    if raw.get("model_type") == MODEL_TYPE:
        return "medusa"
    if is_eagle3(raw):
        return "eagle3"
    names = _tensor_names(path)
    if "fc.weight" in names:
        return "eagle"
    return "draft_model" if "model.embed_tokens.weight" in names else None


def _tensor_names(path: Path) -> set[str]:
    """Those in the safetensors files of a directory. Damaged files are refused by name when they
    are opened, and skipped here."""
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        try:
            check_regular(file)
            with safe_open(file, framework="numpy") as opened:
                names.update(opened.keys())
        except (SafetensorError, ModelError, OSError):
            continue
    return names
