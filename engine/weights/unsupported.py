"""The error for a model that is well described, and that the engine would compute wrongly."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """Says which key is not supported, and which values are. Whoever knows the file adds its name.

    Never leaves `engine.weights`: users see a ModelError.
    """
