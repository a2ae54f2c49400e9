"""A model that is ready to be loaded: where it lies, what it is, and where its answers end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.weights.config import ModelConfig, as_token_ids
from engine.weights.fingerprint import fingerprint
from engine.weights.safetensors_dir import open_weights
from protocol import ModelError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked Hugging Face directory.

    `directory` holds config.json, tokenizer.json and the safetensors (one file or shards with an
    index), and mostly tokenizer_config.json, chat_template.jinja and generation_config.json.
    `fingerprint` is equal exactly where the weights are (see `engine.weights.fingerprint`).
    """

    name: str  # under which it is served
    directory: Path
    config: ModelConfig
    fingerprint: str
    eos_token_ids: tuple[int, ...]  # each of them ends an answer
    bos_token_id: int | None

    @classmethod
    def read(cls, name: str, directory: Path) -> ModelFiles:
        """Check the directory without reading its weights.

        Raises ModelError: a file missing or broken, a model that the engine cannot run, tensors
        that are missing, superfluous or of the wrong shape.
        """
        _check_present(directory)
        config = ModelConfig.load(directory / "config.json")
        weights = open_weights(directory)
        weights.check(config, directory)
        generation = _read_json(directory / "generation_config.json", _GenerationJson)
        return cls(
            name=name,
            directory=directory,
            config=config,
            fingerprint=fingerprint(config, weights),
            eos_token_ids=_eos_token_ids(config, generation, directory),
            bos_token_id=config.bos_token_id,
        )


class _GenerationJson(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _TokenizerConfigJson(msgspec.Struct):
    eos_token: str | dict[str, Any] | None = None


class _AddedTokenJson(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_AddedTokenJson] = []


def _check_present(directory: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ModelError(
                f"{directory}: {name} is missing; a model directory needs config.json,"
                f" tokenizer.json and safetensors{_gguf_hint(directory)}",
                path=str(directory / name),
            )


def _gguf_hint(directory: Path) -> str:
    found = sorted(directory.glob("*.gguf"))
    return f"; for the GGUF file in it, name the file: {found[0]}" if found else ""


def _eos_token_ids(
    config: ModelConfig, generation: _GenerationJson, directory: Path
) -> tuple[int, ...]:
    """generation_config.json goes before config.json, and the tokenizer's own token is added.

    Fine-tunes often change only the last one, and would never stop without it.
    """
    said = as_token_ids(generation.eos_token_id) or config.eos_token_ids
    return tuple(dict.fromkeys((*said, *_tokenizer_eos(directory))))


def _tokenizer_eos(directory: Path) -> tuple[int, ...]:
    eos = _read_json(directory / "tokenizer_config.json", _TokenizerConfigJson).eos_token
    content = eos.get("content") if isinstance(eos, dict) else eos
    tokenizer = _read_json(directory / "tokenizer.json", _TokenizerJson)
    return tuple(token.id for token in tokenizer.added_tokens if token.content == content)


def _read_json(path: Path, kind: type[_T]) -> _T:
    """The parts of a JSON file that `kind` names; its defaults if there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.exists() else b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}", path=str(path)) from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
