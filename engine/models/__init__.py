"""What does a model compute? One small file for each architecture."""

from engine.models.causal_lm import CausalLM
from engine.models.loader import load_model

__all__ = ["CausalLM", "load_model"]
