"""Every notebook runs from top to bottom in a fresh kernel, its assertions hold, and it draws."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from exhaustive import EXHAUSTIVE
from patience import PATIENCE_S

COLAB = Path(__file__).parents[2] / "colab"
PICTURES = {
    "quickstart": 4,
    "under_the_hood": 6,
    "long_context_and_sharding": 4,
    "batch_generation": 2,
    "bring_your_own_model": 2,
    "reinforcement_learning": 1,
    "planning": 6,
    "speculation": 4,
}

SMALLER = {
    "planning": [("SCALES = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)", "SCALES = (0.25, 1, 4, 8)")],
}
"""What is written otherwise in CI."""

pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(1500)]


def test_each_notebook_is_run():
    assert {path.stem for path in COLAB.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_runs_from_top_to_bottom(name, smollm2_path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    # The kernel imports what this process does, and is of the same Python.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    if name == "under_the_hood":  # It shows that all is compiled before the first step.
        monkeypatch.delenv("TESTS_COMPILE", raising=False)
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    for whole, smaller in () if EXHAUSTIVE else SMALLER.get(name, ()):
        (cell,) = [cell for cell in notebook.cells if whole in cell.source]
        cell.source = cell.source.replace(whole, smaller)
    client = nbclient.NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    try:
        client.execute()
    finally:
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")  # to be looked at, with its pictures
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES[name]
    warned = [output.text for output in outputs if output.get("name") == "stderr"]
    assert warned == []
    if name == "batch_generation":
        assert any("<iframe" in output.get("data", {}).get("text/html", "") for output in outputs)


def test_a_start_shows_its_progress_without_widgets(tmp_path, monkeypatch):
    """As text that is replaced in place, and not on stderr, where rich would ask for ipywidgets."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    source = """
from jaxserve.core.process.terminal_progress import TerminalProgress
with TerminalProgress() as progress:
    assert progress.draws
    progress("weights", 1, 2)
    progress("programs", 3, 4)
    progress("weights", 2, 2)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    weights, programs = output["data"]["text/plain"].splitlines()
    assert weights.startswith("Loading weights") and "100%" in weights
    assert programs.startswith("Preparing programs") and " 75%" in programs
