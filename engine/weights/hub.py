"""Models on the Hugging Face hub, through the cache that all of its users share."""

from __future__ import annotations

from pathlib import Path

from protocol import ModelError

# By name, because repositories also carry the same weights in other formats, of the same size.
_NEEDED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)


def fetch_from_hub(model: str) -> Path:
    """The directory of the hub's `model` (`org/name`), downloaded unless the hub's cache has it.

    Raises ModelError: not on the hub, gated, or neither network nor cache.
    """
    # Slow to import, and every other model does without. HTTPError is httpx's or httpx2's, as the
    # hub's own version has it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        return Path(snapshot_download(model, allow_patterns=list(_NEEDED)))
    except (OSError, HTTPError, HFValidationError) as error:
        raise ModelError(
            f"{model}: could not be fetched from the Hugging Face hub:"
            f" {_first_line(error)} (there is no local directory of that name either)"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
