"""What a routing policy may know of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol import HASH_BLOCK_SIZE, BlockHash, GenerationRequest, hash_chain
from router.path import Path


def reusable_hashes(request: GenerationRequest, emitted: Sequence[int] = ()) -> list[BlockHash]:
    """The hashes to look up: of all but the last token, which has to be computed in any case."""
    token_ids = [*request.prompt_token_ids, *emitted]
    return hash_chain(token_ids[:-1], lora_name=request.lora_name, cache_salt=request.cache_salt)


@dataclass(frozen=True)
class RequestFacts:
    """One attempt at a request, in numbers."""

    num_tokens: int  # prompt + emitted: their KV is needed before the next token
    max_new_tokens: int
    cached_tokens: Mapping[str, int] = field(default_factory=dict)  # prefix hit, by node
    avoid: frozenset[str] = frozenset()  # nodes that failed this request before
    prefer: frozenset[str] = frozenset()  # decode nodes that have had a part of it already
    broken: frozenset[Path] = frozenset()  # paths on which its KV was lost
    siblings_at: frozenset[str] = frozenset()  # nodes that decode others of the same prompt

    def __post_init__(self) -> None:
        assert self.num_tokens > 0
        assert self.max_new_tokens > 0

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        prefix_hits: Mapping[str, int],
        emitted: Sequence[int] = (),
        avoid: frozenset[str] = frozenset(),
        prefer: frozenset[str] = frozenset(),
        broken: frozenset[Path] = frozenset(),
        siblings_at: frozenset[str] = frozenset(),
    ) -> RequestFacts:
        """`prefix_hits` is what `PrefixIndex.longest_prefix(reusable_hashes(...))` gave."""
        return cls(
            num_tokens=len(request.prompt_token_ids) + len(emitted),
            max_new_tokens=request.sampling.max_tokens - len(emitted),
            cached_tokens={node: hits * HASH_BLOCK_SIZE for node, hits in prefix_hits.items()},
            avoid=avoid,
            prefer=prefer,
            broken=broken,
            siblings_at=siblings_at,
        )

    def uncached_tokens(self, node_id: str) -> int:
        """Tokens that the node would have to compute or receive; at least one."""
        return max(1, self.num_tokens - self.cached_tokens.get(node_id, 0))
