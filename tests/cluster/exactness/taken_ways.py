"""Takes ways of a tiny model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cluster.exactness import ExactnessConfig, MakeCompute, Verification, WayResult
from engine.weights import ModelFiles, ModelStore
from tests.engine.tiny import tiny_model_dir

Verify = Callable[..., Awaitable[dict[str, WayResult]]]


async def take_all(
    files: ModelFiles,
    config: ExactnessConfig | None = None,
    *,
    make_compute: MakeCompute | None = None,
    only: tuple[str, ...] = (),
) -> dict[str, WayResult]:
    """What came of each way, or of the reference and those that are named."""
    verification = Verification(files, config or ExactnessConfig(), make_compute)
    if only:
        verification.ways = [way for way in verification.ways if way.name in only]
        assert len(verification.ways) == len(only)
    return {result.name: result async for result in verification.run()}


def model_dir(folder: Path, **overrides: Any) -> ModelFiles:
    """Another tiny model."""
    return ModelStore(folder).resolve(str(tiny_model_dir(folder / "model", **overrides)))
