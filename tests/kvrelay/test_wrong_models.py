"""Models that cannot be served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kvrelay.command import Kvrelay


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A complete one, to be spoiled."""
    return Path(shutil.copytree(tiny_model, tmp_path / "spoiled"))


def test_a_file_that_is_no_model(kvrelay: Kvrelay, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no model")
    _refused(kvrelay, path, "notes.txt", ".gguf")


def test_an_empty_directory(kvrelay: Kvrelay, tmp_path: Path) -> None:
    _refused(kvrelay, tmp_path, "config.json is missing")


def test_no_weights(kvrelay: Kvrelay, model: Path) -> None:
    (model / "model.safetensors").unlink()
    _refused(kvrelay, model, "model.safetensors")


def test_a_config_that_is_not_json(kvrelay: Kvrelay, model: Path) -> None:
    (model / "config.json").write_text("{")
    _refused(kvrelay, model, "config.json")


def test_a_tokenizer_that_is_none(kvrelay: Kvrelay, model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    _refused(kvrelay, model, "tokenizer.json")


def test_a_chat_template_with_a_mistake(kvrelay: Kvrelay, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    _refused(kvrelay, model, "chat_template.jinja")


def test_safetensors_cut_off_in_the_weights(kvrelay: Kvrelay, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    _refused(kvrelay, model, "model.safetensors", "promises")


def test_safetensors_cut_off_in_the_header(kvrelay: Kvrelay, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    _refused(kvrelay, model, "model.safetensors", "cut off in its header")


def _refused(kvrelay: Kvrelay, model: Path, *words: str) -> None:
    kvrelay("serve", model, "--port", "0").check_refused(*words)
