"""The KV cache's blocks: which are free, which hold a known prefix, which sequence has which."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from .sequence import Sequence


class BlockManager:
    """The record of which sequences own which KV block.

    free (ref_count 0)                         in use (ref_count > 0)
    ├─ blank: taken first, the last one freed  ├─ private: the block that a sequence is writing
    └─ cached: full, found by its hash,        └─ published: full, found by its hash, shared, never written
       reused or evicted, oldest first

    A block is published (`cache_blocks`) after its KV exists. Its hash chains over all tokens before it and is salted
    with the weight version, so equal hash means equal KV, as bits.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.salt = b""
        self.ref_count = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of eviction
        self.copies: list[tuple[int, int]] = []  # (source, destination), due before the next step's writes

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give out."""
        return len(self.free_blocks)

    def count_private(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that only one of these sequences has: `free` of them makes these free."""
        return sum(self.ref_count[block] == 1 for seq in sequences for block in seq.block_table)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def _hash(self, previous: bytes, token_ids: list[int]) -> bytes:
        return hashlib.blake2b(previous + array("q", token_ids).tobytes(), digest_size=16, key=self.salt).digest()

    def _share(self, block: int) -> int:
        """Add an owner and return the block."""
        if self.ref_count[block] == 0:
            del self.free_blocks[block]
        self.ref_count[block] += 1
        return block

    def _drop(self, block: int) -> None:
        """Remove an owner; the last one makes the block free."""
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self._order(block)

    def _order(self, block: int) -> None:
        """Put a free block at the end of the order of eviction, a blank one at its head: written memory is at hand."""
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block, last=self.hash_of[block] is not None)

    def _forget(self, block: int) -> None:
        if (digest := self.hash_of[block]) is not None:
            del self.block_of[digest]
            self.hash_of[block] = None
            if self.ref_count[block] == 0:
                self._order(block)

    def _new_block(self) -> int:
        block = next(iter(self.free_blocks))
        self._forget(block)
        return self._share(block)

    def match_prefix(self, seq: Sequence) -> int:
        """Give a sequence without blocks the cached blocks of its longest known prefix; return the tokens hit.

        At least one token is left to compute: its hidden state gives the next token.
        """
        assert not seq.block_table and seq.num_cached_tokens == 0
        if seq.use_prefix_cache:
            size = self.block_size
            digest = seq.cache_salt
            for start in range(0, (seq.num_tokens - 1) // size * size, size):
                digest = self._hash(digest, seq.token_ids[start : start + size])
                block = self.block_of.get(digest)
                if block is None:
                    break
                seq.block_table.append(self._share(block))
                seq.block_hashes.append(digest)
            seq.num_cached_tokens = len(seq.block_table) * size
        return seq.num_cached_tokens

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its first `num_tokens` tokens, or change nothing and return False."""
        missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if missing > self.num_free:
            return False
        seq.block_table.extend(self._new_block() for _ in range(missing))
        return True

    def cache_blocks(self, seq: Sequence) -> None:
        """Make a sequence's full blocks findable whose KV exists and whose tokens are known.

        A duplicate is swapped for the block already known.
        """
        if not seq.use_prefix_cache or seq.stale_kv:
            return
        size = self.block_size
        for i in range(len(seq.block_hashes), min(seq.num_cached_tokens, len(seq.token_ids)) // size):
            previous = seq.block_hashes[-1] if seq.block_hashes else seq.cache_salt
            digest = self._hash(previous, seq.token_ids[i * size : (i + 1) * size])
            seq.block_hashes.append(digest)
            block = seq.block_table[i]
            known = self.block_of.get(digest)
            if known is None:
                self.block_of[digest] = block
                self.hash_of[block] = digest
            elif known != block:
                seq.block_table[i] = self._share(known)
                self._drop(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` start from all of `parent`'s KV: full blocks shared, the last partial one copied.

        The copy needs one free block. Until it is made its source is kept, even where `parent` ends before.
        """
        assert not child.block_table and parent.num_cached_tokens == child.num_tokens
        full = parent.num_cached_tokens // self.block_size
        child.block_table = [self._share(block) for block in parent.block_table[:full]]
        child.block_hashes = list(parent.block_hashes)
        child.num_cached_tokens = parent.num_cached_tokens
        child.stale_kv = parent.stale_kv
        if parent.num_cached_tokens % self.block_size:
            child.block_table.append(self._new_block())
            self.copies.append((self._share(parent.block_table[full]), child.block_table[-1]))

    def end_copies(self) -> None:
        """Record that a step was submitted, which makes the copies."""
        self._drop_copies(self.copies)

    def _drop_copies(self, copies: list[tuple[int, int]]) -> None:
        for source, _ in copies:
            self._drop(source)
        self.copies = [copy for copy in self.copies if copy not in copies]

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; later blocks are evicted before those that they build on."""
        self._drop_copies([copy for copy in self.copies if copy[1] in seq.block_table])
        for block in reversed(seq.block_table):
            self._drop(block)
        seq.block_table = []
        seq.block_hashes = []
        seq.num_cached_tokens = 0

    def reset_prefix_cache(self, salt: bytes) -> None:
        """Forget every hash; blocks in use stay with their owners but are found no more."""
        for block in range(self.num_blocks):
            self._forget(block)
        self.salt = salt
