"""What one device answers, for all meshes to be compared with."""

from __future__ import annotations

import pytest
from mesh_engines import on_mesh, write_llama
from mesh_workload import answer_alone


@pytest.fixture(scope="session")
def answered(tmp_path_factory):
    """A directory with a tiny Llama of four layers and what one device answers."""
    directory = tmp_path_factory.mktemp("answered")
    write_llama(directory / "model", num_hidden_layers=4)
    on_mesh("", answer_alone, directory)
    return directory
