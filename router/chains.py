"""Which blocks one node holds, and which of them are complete from the root.

A cached block is of use only if all blocks before it are cached too: its chain is complete.

        a ── b ── c ── d          a, b, c, d and e are held and complete
             └─── e
        a ── · ── c ── d          b was removed: c, d and e are held, but incomplete
             ·─── e
        a ── b ── c ── d          b was stored again: they are complete again
             └─── e

So along any chain the complete blocks come first, and a bisection finds the last of them.
"""

from __future__ import annotations

from collections import OrderedDict

from protocol import BlockHash


class ChainSet:
    """The held blocks of one node as a forest.

    Storing and removing cost O(1) plus the number of blocks whose completeness changes: none
    when a node evicts the end of a chain before its beginning, as block pools do.
    """

    def __init__(self) -> None:
        self._parents: dict[BlockHash, BlockHash | None] = {}  # of each held block; None: first
        self._children: dict[BlockHash, set[BlockHash]] = {}  # held ones; of absent parents too
        self._complete: set[BlockHash] = set()
        self._leaves: OrderedDict[BlockHash, None] = OrderedDict()  # without child, oldest first

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._parents

    def is_complete(self, block: BlockHash) -> bool:
        """Whether the block and all before it are held."""
        return block in self._complete

    def store(self, block: BlockHash, parent: BlockHash | None) -> None:
        """The block is held from now on; it follows `parent`, or begins a chain."""
        if block in self._parents:
            return
        self._parents[block] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(block)
            self._leaves.pop(parent, None)
        if block not in self._children:
            self._leaves[block] = None
        if parent is None or parent in self._complete:
            self._complete_from(block)

    def remove(self, block: BlockHash) -> None:
        """The block is not held any more; what follows it stays, incomplete."""
        if block not in self._parents:
            return
        parent = self._parents.pop(block)
        self._leaves.pop(block, None)
        self._break_from(block)
        if parent is not None:
            self._unlink(block, parent)

    def remove_oldest_leaf(self) -> BlockHash:
        """Forget the block that has waited longest for one to follow it.

        Ends go before beginnings, so that what remains is complete: the first blocks of a shared
        system prompt are the oldest of all and the most useful.
        """
        block = next(iter(self._leaves))
        self.remove(block)
        return block

    def clear(self) -> None:
        self._parents.clear()
        self._children.clear()
        self._complete.clear()
        self._leaves.clear()

    def check_integrity(self) -> None:
        """Assert that the links, the leaves and the completeness agree with each other."""
        for block, parent in self._parents.items():
            assert parent is None or block in self._children[parent]
            assert (block in self._leaves) == (block not in self._children)
            complete = parent is None or parent in self._complete
            assert (block in self._complete) == complete
        linked = sum(len(children) for children in self._children.values())
        assert linked == sum(parent is not None for parent in self._parents.values())
        assert self._complete <= self._parents.keys()
        assert self._leaves.keys() <= self._parents.keys()

    def _unlink(self, block: BlockHash, parent: BlockHash) -> None:
        siblings = self._children[parent]
        siblings.discard(block)
        if siblings:
            return
        del self._children[parent]
        if parent in self._parents:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)  # older than the block that followed it

    def _complete_from(self, block: BlockHash) -> None:
        reached = [block]
        while reached:
            block = reached.pop()
            self._complete.add(block)
            reached.extend(self._children.get(block, ()))

    def _break_from(self, block: BlockHash) -> None:
        reached = [block]
        while reached:
            block = reached.pop()
            if block in self._complete:
                self._complete.remove(block)
                reached.extend(self._children.get(block, ()))
