"""Prefixes that need not be read again (k3_system.md section 5).

A prefix of the cache ends at a hash block: `block` tokens, a divisor of a page. Its key chains the keys before it, from a
root that names model, mode and version of the weights. Each key knows the page with its MLA rows; some also hold a
checkpoint, a copy of the state of every KDA layer at that place. A hit is the longest prefix whose keys are all there and
whose last one has a checkpoint.

Three rules keep it right. Pages of a hit are shared before any page is taken, so that taking cannot evict them. A key is
entered only after the forward pass that computed it. A checkpoint is one object: all layers of it go at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moonlet.model.state import KDAState
from moonlet.serve.pages import PagePool

Checkpoint = dict[int, KDAState]  # by layer; read only


@dataclass(eq=False)
class Node:
    """The end of a cached prefix of `position` tokens."""

    key: bytes
    position: int
    page: int
    parent: Node | None
    checkpoint: Checkpoint | None = None
    num_children: int = 0
    used: int = 0  # the cache's clock when it was last of use


@dataclass(frozen=True)
class Hit:
    """`length` tokens whose `pages` are shared with the caller, and the checkpoint to copy."""

    length: int
    pages: list[int]
    checkpoint: Checkpoint
    nodes: list[Node] = field(repr=False, default_factory=list)


class Outside(Protocol):
    """A store outside of the engine: what is evicted goes there, what is missing may come from there."""

    def save(self, node: Node) -> None: ...

    def load(self, cache: PrefixCache, parent: Node | None, keys: Sequence[bytes]) -> None:
        """Enter as many of the keys that follow `parent` as it has, in order."""


def chain_keys(keys: list[bytes], root: bytes, ids: Sequence[int], block: int) -> list[bytes]:
    """`keys` of the first blocks of `ids`, extended in place to one for every whole block."""
    key = keys[-1] if keys else root
    for start in range(len(keys) * block, len(ids) - block + 1, block):
        key = hashlib.sha256(key + np.asarray(ids[start : start + block], dtype=np.int64).tobytes()).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Keys, pages and checkpoints over one pool.

    Args:
        root: names all that the numbers depend on besides the tokens.
        max_checkpoint_bytes: for KDA states; the least recently used go first.
    """

    def __init__(
        self, pool: PagePool, block: int, root: bytes, max_checkpoint_bytes: int, outside: Outside | None = None
    ):
        if pool.page_rows % block:
            raise ValueError(f"hash blocks of {block} tokens do not divide pages of {pool.page_rows}")
        self.pool, self.block, self.root = pool, block, root
        self.outside = outside
        self.nodes: dict[bytes, Node] = {}
        self.num_hit_tokens = self.num_asked_tokens = self.num_hits = 0
        self._max_bytes, self._bytes = max_checkpoint_bytes, 0
        self._clock = 0

    # -- reading ------------------------------------------------------------------------------------------------------
    def match(self, ids: Sequence[int]) -> Hit | None:
        """The longest usable prefix that leaves at least one token to read. Its pages are the caller's to release.

        The last page is a copy if the prefix ends inside it: the caller goes on writing there. May raise
        OutOfPagesError; then nothing is shared.
        """
        self.num_asked_tokens += len(ids)
        keys = chain_keys([], self.root, ids[: len(ids) - 1], self.block)
        nodes = self._walk(keys)
        if self.outside is not None and len(nodes) < len(keys):
            self.outside.load(self, nodes[-1] if nodes else None, keys[len(nodes) :])
            nodes = self._walk(keys)
        while nodes and nodes[-1].checkpoint is None:
            nodes.pop()
        if not nodes:
            return None
        self._touch(nodes)
        pages = self._share(nodes)
        checkpoint = nodes[-1].checkpoint
        assert checkpoint is not None
        self.num_hits += 1
        self.num_hit_tokens += nodes[-1].position
        return Hit(nodes[-1].position, pages, checkpoint, nodes)

    def _walk(self, keys: Sequence[bytes]) -> list[Node]:
        nodes: list[Node] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _share(self, nodes: list[Node]) -> list[int]:
        """Whole pages shared, the begun one copied; a node's page holds all rows of its own page before it."""
        last, rows = nodes[-1], self.pool.page_rows
        whole = [node.page for node in nodes if node.position % rows == 0]
        begun = last.position % rows
        held = [*whole, last.page] if begun else whole
        for page in held:
            self.pool.share(page)
        if not begun:
            return whole
        try:
            own = self.pool.take()
        except Exception:
            for page in held:
                self.pool.release(page)
            raise
        self.pool.copy_rows(last.page, own, begun)
        self.pool.release(last.page)
        return [*whole, own]

    # -- writing ------------------------------------------------------------------------------------------------------
    def enter(self, keys: Sequence[bytes], table: Sequence[int], checkpoint: Checkpoint | None = None) -> Node | None:
        """The blocks of `keys` are computed and their rows lie in the pages of `table`. `checkpoint` is the state after
        the last of them; it is the cache's from now on. Returns the last node, None without keys."""
        known = len(keys)
        while known and keys[known - 1] not in self.nodes:  # a key that is there has all before it there
            known -= 1
        node = self.nodes[keys[known - 1]] if known else None
        for index in range(known, len(keys)):
            position = (index + 1) * self.block
            node = self.add(keys[index], position, table[(position - 1) // self.pool.page_rows], node)
        if node is not None:
            self._touch([node])
            if checkpoint is not None:
                self.keep_checkpoint(node, checkpoint)
        return node

    def add(self, key: bytes, position: int, page: int, parent: Node | None) -> Node:
        """A new key; its page is shared with the cache."""
        self.pool.share(page)
        node = Node(key, position, page, parent)
        self.nodes[key] = node
        if parent is not None:
            parent.num_children += 1
        self._touch([node])
        return node

    def keep_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        if node.checkpoint is None and node.key in self.nodes:
            node.checkpoint = checkpoint
            self._bytes += _num_bytes(checkpoint)
            self._fit(node)

    def drop_checkpoint(self, node: Node) -> None:
        """All layers of it at once; the key and its rows stay."""
        if node.checkpoint is not None:
            self._bytes -= _num_bytes(node.checkpoint)
            node.checkpoint = None

    def _fit(self, keep: Node) -> None:
        """Drop the least recently used checkpoints beyond the budget."""
        if self._bytes <= self._max_bytes:
            return
        holders = sorted((node for node in self.nodes.values() if node.checkpoint is not None), key=lambda n: n.used)
        for node in holders:
            if self._bytes <= self._max_bytes:
                return
            if node is not keep:
                if self.outside is not None:
                    self.outside.save(node)
                self.drop_checkpoint(node)

    # -- forgetting ---------------------------------------------------------------------------------------------------
    def evict(self) -> bool:
        """Forget the least recently used ends of prefixes until a page is free. Returns whether one is."""
        leaves = sorted((node for node in self.nodes.values() if not node.num_children), key=lambda node: node.used)
        while leaves:
            node = leaves.pop(0)
            if self.outside is not None:
                self.outside.save(node)
            if self.forget(node):
                return True
            parent = node.parent
            if parent is not None and not parent.num_children:
                leaves.append(parent)
                leaves.sort(key=lambda leaf: leaf.used)
        return False

    def forget(self, node: Node) -> bool:
        """Remove a key that has no children; returns whether its page is free now."""
        assert not node.num_children, "prefixes are forgotten from their ends"
        self.drop_checkpoint(node)
        del self.nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1
        return self.pool.release(node.page)

    def clear(self, root: bytes) -> None:
        """Forget everything; from now on keys begin at `root` (other weights)."""
        for node in sorted(self.nodes.values(), key=lambda node: -node.position):
            self.forget(node)
        self.root = root

    def _touch(self, nodes: Sequence[Node]) -> None:
        self._clock += 1
        for node in nodes:
            node.used = self._clock

    @property
    def checkpoint_bytes(self) -> int:
        return self._bytes


def _num_bytes(checkpoint: Checkpoint) -> int:
    return sum(state.num_bytes for state in checkpoint.values())
