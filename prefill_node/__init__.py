"""What is special about prefill? It ends with the first token and pushes the KV away."""

from prefill_node.node import PrefillRole

__all__ = ["PrefillRole"]
