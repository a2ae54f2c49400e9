"""What is special about prefill? It ends with the first token and pushes the KV away."""

from prefill_node.node import LocalPrefillNode, PrefillRole

__all__ = ["LocalPrefillNode", "PrefillRole"]
