"""Writes families.json and families.npz: what transformers computes for every family member.

The JSON file holds the versions used and, for each member, its `config.json` and the names and
shapes of its tensors; the npz file holds its logits, float32 [tokens, vocab].

    pip install -e '.[peers]'
    PYTHONPATH=tests/models python tests/models/golden/make_family_golden.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from family_members import MEMBERS, hf_config, hf_logits, hf_model, hf_shapes

HERE = Path(__file__).parent


def main() -> None:
    logits, lines = {}, []
    for name, member in MEMBERS.items():
        model = hf_model(member)
        logits[name] = hf_logits(model)
        with tempfile.TemporaryDirectory() as directory:
            config = hf_config(model, Path(directory))
        entry = {"config": config, "shapes": hf_shapes(model)}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (HERE / "families.json").write_text(
        f'{{"versions": {json.dumps(versions)},\n"members": {{\n' + ",\n".join(lines) + "\n}}\n",
        encoding="utf-8",
    )
    np.savez_compressed(HERE / "families.npz", **logits)


if __name__ == "__main__":
    main()
