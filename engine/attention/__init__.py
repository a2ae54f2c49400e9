"""How does a token see the tokens before it? Metadata of a step, and one kernel per device."""

from engine.attention.attention import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.metadata import AttentionMetadata

__all__ = ["Attention", "AttentionMetadata", "CpuAttention"]
