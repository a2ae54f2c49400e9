"""Where models come from: every name that a user may type becomes a checked directory.

smollm2-135m        built in     downloaded and converted once   <cache>/builtin/<name>/
a/model.gguf        GGUF file    converted once                  <cache>/gguf/<stem>-<path>/
a/directory         Hugging Face used where it lies
org/name            hub id       huggingface_hub's own cache
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from pathlib import Path

from engine.weights.builtin import BUILTIN_MODELS, BuiltinModel, fetch_builtin
from engine.weights.gguf import CONVERTER_VERSION, convert_gguf
from engine.weights.hub import fetch_from_hub
from engine.weights.model_files import ModelFiles
from engine.weights.progress import NoProgress, ProgressSink
from engine.weights.staging import build_once
from protocol import ModelError

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


class ModelStore:
    """Finds models, and keeps below `cache_dir` what had to be fetched or converted."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir

    def resolve(self, model: str, *, progress: ProgressSink | None = None) -> ModelFiles:
        """Find, fetch and convert as needed; the second time this takes milliseconds.

        `model` is an alias, a path to a Hugging Face directory or to a GGUF file, or a hub id. Safe
        to call from several processes at once. Raises ModelError: unknown, missing or broken, of a
        kind that the engine cannot run, no network, or no room.
        """
        sink = progress or NoProgress()
        try:
            return self._resolve(model, sink)
        except OSError as error:
            raise ModelError(
                f"{model}: {error.strerror or error}: {error.filename or self._cache_dir}",
                path=error.filename and str(error.filename),
            ) from error

    def _resolve(self, model: str, progress: ProgressSink) -> ModelFiles:
        if model in BUILTIN_MODELS:
            return self._builtin(BUILTIN_MODELS[model], progress)
        if not model:
            raise _unknown(model)
        path = Path(os.path.expanduser(model))  # Path's own raises for a user who does not exist
        if path.is_dir():
            return ModelFiles.read(path.resolve().name, path.resolve())
        if path.is_file():
            return self._gguf(path.resolve(), progress)
        if _looks_like_path(model):
            raise ModelError(f"{model}: there is no such file or directory", path=model)
        if _HUB_ID.fullmatch(model):
            return ModelFiles.read(model, fetch_from_hub(model))
        raise _unknown(model)

    def _builtin(self, model: BuiltinModel, progress: ProgressSink) -> ModelFiles:
        state = _short_digest(model.gguf_sha256, CONVERTER_VERSION)
        target = self._cache_dir / "builtin" / model.name / state
        build_once(target, lambda empty: fetch_builtin(model, empty, progress), progress)
        return ModelFiles.read(model.name, target)

    def _gguf(self, path: Path, progress: ProgressSink) -> ModelFiles:
        """A file is taken for the same as long as its path, size and time of change are: reading
        gigabytes at every start just to be sure would cost more than converting again."""
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path}: not a model; give a .gguf file or a Hugging Face directory",
                path=str(path),
            )
        stat = path.stat()
        state = _short_digest(stat.st_size, stat.st_mtime_ns, CONVERTER_VERSION)
        target = self._cache_dir / "gguf" / f"{path.stem}-{_short_digest(path)}" / state
        build_once(target, lambda empty: convert_gguf(path, empty, progress), progress)
        return ModelFiles.read(path.stem, target)


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1


def _short_digest(*parts: object) -> str:
    return hashlib.sha256(repr([str(part) for part in parts]).encode()).hexdigest()[:16]


def _unknown(model: str) -> ModelError:
    close = difflib.get_close_matches(model.lower(), BUILTIN_MODELS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ModelError(
        f"unknown model {model!r}; {hint}known names: {', '.join(BUILTIN_MODELS)}; or give a"
        " Hugging Face directory, a .gguf file or a hub id like org/name"
    )
