from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from engine.weights import ModelStore
from protocol import ModelError
from tests.engine.weights.tiny_models import write_hf_directory


def test_a_model_of_the_hub(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_hf_directory(tmp_path / "snapshot", num_shards=2)
    asked: list[tuple[str, list[str]]] = []

    def download(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = store.resolve("org/tiny")
    assert (files.name, files.directory) == ("org/tiny", snapshot)
    assert asked[0][0] == "org/tiny"
    assert "model-*.safetensors" in asked[0][1]
    assert "*.bin" not in asked[0][1]


def test_offline(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"org/tiny: could not be fetched .*no local directory"):
        store.resolve("org/tiny")


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no connection\nmore"),
        ConnectionError("refused"),
        HFValidationError("bad name"),
    ],
)
def test_every_failure_is_a_model_error(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="could not be fetched") as caught:
        store.resolve("org/tiny")
    assert "\n" not in str(caught.value)
