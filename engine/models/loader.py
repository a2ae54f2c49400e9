"""From a checked directory to a model that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.models.causal_lm import CausalLM
from engine.models.llama import LlamaForCausalLM
from engine.models.mapped_weights import MappedWeights
from engine.weights import ModelConfig, open_weights

ARCHITECTURES: Mapping[str, Callable[[ModelConfig, MappedWeights], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def load_model(directory: Path) -> CausalLM:
    """Map the weights of a Hugging Face directory.

    Raises ModelError: a file missing or broken, a model that the engine cannot run, tensors that
    are missing, superfluous or of the wrong shape.
    """
    config = ModelConfig.load(directory / "config.json")
    index = open_weights(directory)
    index.check(config, directory)
    return ARCHITECTURES[config.architecture](config, MappedWeights(index))
