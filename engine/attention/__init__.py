"""How does a token see the tokens before it? Metadata of a step, and one kernel per device."""

from engine.attention.attend_with import attend_with
from engine.attention.attention import Attention
from engine.attention.compiled_attention import CompiledAttention
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_attention import TorchAttention

__all__ = ["Attention", "AttentionMetadata", "CompiledAttention", "TorchAttention", "attend_with"]
