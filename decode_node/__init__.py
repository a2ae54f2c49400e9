"""What is special about decode? It reserves blocks, parks requests, and goes on at token 2."""

from decode_node.config import DecodeConfig
from decode_node.node import DecodeRole

__all__ = ["DecodeConfig", "DecodeRole"]
