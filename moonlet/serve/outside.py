"""Cached prefixes in an external store: what the engine forgets goes there, what it misses may come from there.

Two records for each key: the MLA rows of its block, and the checkpoint where there is one. A block is of use only with all
blocks before it, and only up to the last one that has a checkpoint; nothing less is taken in. The store may lose, be late or
damage what it likes: a record that is not whole, of this model and of these weights is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moonlet.errors import StateRecordError
from moonlet.model.state import KDAState
from moonlet.serve.pages import OutOfPagesError
from moonlet.serve.prefix_cache import Checkpoint, Node, PrefixCache
from moonlet.serve.state_record import StateRecord, pack, specs_of, unpack
from moonlet.serve.state_store import StateStore

if TYPE_CHECKING:
    from moonlet.serve.engine import Engine

_KEYS_AT_ONCE = 64
_NAMES = ("recurrent", "conv_q", "conv_k", "conv_v", "open_q", "open_k", "open_v", "open_g", "open_beta", "open_fill")


class StoredPrefixes:
    """The `Outside` of a prefix cache, over a state store.

    Args:
        deadline_s: for one batch of the store; later answers are misses.
    """

    def __init__(self, engine: Engine, store: StateStore, deadline_s: float = 0.25) -> None:
        self.engine, self.store, self.deadline_s = engine, store, deadline_s
        self.num_loaded = self.num_damaged = 0

    # -- out ----------------------------------------------------------------------------------------------------------
    def save(self, node: Node) -> None:
        """Hand a prefix's last block, and its checkpoint if there is one, to the store."""
        rows, state = node.key + b"r", node.key + b"c"
        items = {rows: self._pack(rows, node.position, self._rows(node))}
        if node.checkpoint is not None:
            items[state] = self._pack(state, node.position, self._named(node.checkpoint))
        self.store.put_many(items, self.deadline_s)

    def _pack(self, key: bytes, position: int, layers: list[dict[str, Tensor]]) -> bytes:
        return pack(StateRecord(key.hex(), position, self.engine.weights_version, self.engine.model_id, layers))

    def _layers(self) -> range:
        return range(len(self.engine.model.model.layers))

    def _rows(self, node: Node) -> list[dict[str, Tensor]]:
        pool, block = self.engine.pool, self.engine.config.hash_block
        stop = (node.position - 1) % pool.page_rows + 1
        rows = {index: {"mla": pages[node.page, stop - block : stop]} for index, pages in pool.rows.items()}
        return [rows.get(index, {}) for index in self._layers()]

    def _named(self, checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
        states = {index: dict(zip(_NAMES, state.tensors())) for index, state in checkpoint.items()}
        return [{str(name): x for name, x in states.get(index, {}).items()} for index in self._layers()]

    # -- in -----------------------------------------------------------------------------------------------------------
    def load(self, cache: PrefixCache, parent: Node | None, keys: Sequence[bytes]) -> None:
        """Enter the blocks that follow `parent`, up to the last one with a checkpoint."""
        blocks = self._fetch(0 if parent is None else parent.position, keys)
        if not blocks:
            return
        if parent is not None:
            parent.num_children += 1  # so that taking pages cannot evict what the blocks hang on
        try:
            self._enter(cache, parent, blocks)
        except OutOfPagesError:
            pass  # what is entered by then is whole; the rest is read again
        finally:
            if parent is not None:
                parent.num_children -= 1

    def _fetch(
        self, position: int, keys: Sequence[bytes]
    ) -> list[tuple[bytes, list[dict[str, Tensor]], Checkpoint | None]]:
        """Blocks in order without a gap, ending with one that has a checkpoint."""
        found: list[tuple[bytes, list[dict[str, Tensor]], Checkpoint | None]] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            batch = keys[start : start + _KEYS_AT_ONCE]
            data = self.store.get_many([key + kind for key in batch for kind in (b"r", b"c")], self.deadline_s)
            for key in batch:
                position += self.engine.config.hash_block
                rows = self._unpack(data, key + b"r", position, self._row_specs)
                if rows is None:
                    break
                named = self._unpack(data, key + b"c", position, self._checkpoint_specs)
                found.append((key, rows, None if named is None else _checkpoint(named)))
            if len(found) < start + len(batch):
                break
        while found and found[-1][2] is None:
            found.pop()
        return found

    def _unpack(
        self, data: Mapping[bytes, bytes], key: bytes, position: int, specs: list
    ) -> list[dict[str, Tensor]] | None:
        if key not in data:
            return None
        try:
            record = unpack(
                data[key],
                expect_weights_version=self.engine.weights_version,
                expect_model_id=self.engine.model_id,
                expect_layers=specs,
            )
        except StateRecordError as error:
            self.num_damaged += 1
            logging.getLogger("moonlet").warning("a cached prefix from the store is not used: %s", error)
            return None
        return record.layers if (record.kind, record.length) == (key.hex(), position) else None

    @property
    def _row_specs(self) -> list:
        block, rows = self.engine.config.hash_block, self.engine.pool.rows
        return specs_of([{"mla": rows[index][0, :block]} if index in rows else {} for index in self._layers()])

    @property
    def _checkpoint_specs(self) -> list:
        return specs_of(self._named(self.engine.runner.new_states()))

    def _enter(self, cache: PrefixCache, parent: Node | None, blocks: list) -> None:
        pool, block = cache.pool, cache.block
        position = 0 if parent is None else parent.position
        page: int | None = None
        try:
            for key, rows, checkpoint in blocks:
                begun = position % pool.page_rows
                if page is None or not begun:
                    fresh = pool.take()
                    if page is not None:
                        pool.release(page)
                    elif begun and parent is not None:
                        pool.copy_rows(parent.page, fresh, begun)
                    page = fresh
                for index, pages in pool.rows.items():
                    pages[page, begun : begun + block] = rows[index]["mla"]
                position += block
                parent = cache.add(key, position, page, parent)
                self.num_loaded += 1
                if checkpoint is not None:
                    cache.keep_checkpoint(parent, checkpoint)
        finally:
            if page is not None:
                pool.release(page)


def _checkpoint(layers: list[dict[str, Tensor]]) -> Checkpoint:
    return {
        index: KDAState.of_tensors([named[name].clone() for name in _NAMES if name in named])
        for index, named in enumerate(layers)
        if named
    }
