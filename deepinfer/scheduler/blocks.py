"""KV blocks of one attention replica: reference counts, and a prefix cache of the blocks nobody uses now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class BlockPool:
    """`num_blocks` blocks. A released block that was published stays findable by its hash until it is reused.

    Free blocks are taken in this order: unpublished ones, never used ones, then published ones, least recently
    released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._next_fresh = 0
        self._recycled: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # published and unused, oldest first
        self._references: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return self.num_blocks - len(self._references)

    @property
    def references(self) -> Mapping[int, int]:
        """Users of each block in use."""
        return self._references

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of the longest published prefix of `hashes`; valid until the next `allocate`."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of these blocks count as free now, and would not any more once acquired."""
        return sum(block not in self._references for block in blocks)

    def num_sole(self, blocks: Iterable[int]) -> int:
        """How many of these used blocks have one user only."""
        return sum(self._references[block] == 1 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a user to published blocks that `match` found."""
        for block in blocks:
            users = self._references.get(block, 0)
            if users == 0:
                del self._cached[block]
            self._references[block] = users + 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each. The caller has checked `num_free`."""
        recycled = self._recycled
        taken = min(count, len(recycled))
        blocks = recycled[len(recycled) - taken :]
        del recycled[len(recycled) - taken :]
        fresh = min(count - taken, self.num_blocks - self._next_fresh)
        if fresh:
            blocks.extend(range(self._next_fresh, self._next_fresh + fresh))
            self._next_fresh += fresh
        blocks.extend(self._evict() for _ in range(count - taken - fresh))
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each block; the end of a prefix becomes reusable before its beginning."""
        references, hash_of = self._references, self._hash_of
        if hash_of.keys().isdisjoint(blocks):  # then nobody else can have found them
            for block in blocks:
                del references[block]
            self._recycled.extend(blocks)
            return
        for block in reversed(blocks):
            users = references[block]
            if users > 1:
                references[block] = users - 1
                continue
            del references[block]
            if block in hash_of:
                self._cached[block] = None
            else:
                self._recycled.append(block)

    def publish(self, blocks: Iterable[int], hashes: Iterable[int]) -> None:
        """Make computed blocks findable; a hash that is already published keeps its first block."""
        block_of, hash_of = self._block_of, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in block_of and block not in hash_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that the two hash maps mirror each other."""
        recycled, used = set(self._recycled), set(self._references)
        assert len(recycled) == len(self._recycled), "a block was recycled twice"
        assert not recycled & used, "a block is both free and used"
        assert not recycled & set(self._hash_of), "a recycled block is still published"
        assert set(self._cached) <= set(self._hash_of), "an unpublished block is cached"
        assert not set(self._cached) & used, "a cached block is in use"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "hash maps disagree"
        known = len(recycled) + len(self._cached) + len(used)
        assert known == self._next_fresh <= self.num_blocks, "blocks were lost or invented"
        assert all(users > 0 for users in self._references.values()), "a block has no user"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block
