"""The block pool against a naive model: lists and a search, no shared code and no clever order."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.scheduler.blocks import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Owners hold prefixes of a few hash chains. The model stamps every release and scans for what goes first.

    Free blocks that are not published may go in any order, but before all published ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = itertools.count()
        self.users: dict[int, int] = {}
        self.hash_of: dict[int, int] = {}
        self.released_at: dict[int, int] = {}
        self.owners: list[list[int]] = []

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.all = range(num_blocks)

    def published(self, block_hash: int) -> int | None:
        return next((b for b, h in self.hash_of.items() if h == block_hash), None)

    def take(self, block: int) -> None:
        """One allocation as the model allows it: the class of the block, and its place within the class."""
        free = [b for b in self.all if b not in self.users]
        unpublished = [b for b in free if b not in self.hash_of]
        if unpublished:
            assert block in unpublished, "a published block was evicted while an unpublished one was free"
        else:
            oldest = min(free, key=lambda b: self.released_at[b])
            assert block == oldest, "the evicted block is not the least recently released one"
            del self.hash_of[block]
        self.users[block] = 1

    @precondition(lambda self: len(self.users) < len(self.all))
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.all) - len(self.users)))
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        for block in blocks:
            self.take(block)
        self.owners.append(blocks)

    @rule(chain=st.integers(0, 2), length=st.integers(1, 6))
    def match_and_acquire(self, chain: int, length: int) -> None:
        hashes = [10 * chain + i for i in range(length)]
        expected = list(itertools.takewhile(lambda b: b is not None, map(self.published, hashes)))
        found = self.pool.match(hashes)
        assert found == expected
        assert self.pool.num_unused(found) == sum(b not in self.users for b in found)
        self.pool.acquire(found)
        for block in found:
            self.users[block] = self.users.get(block, 0) + 1
        if found:
            self.owners.append(found)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), chain=st.integers(0, 2))
    def publish(self, data: st.DataObject, chain: int) -> None:
        """Publish an owner's table as the beginning of a chain, as a prompt would be."""
        for i, block in enumerate(data.draw(st.sampled_from(self.owners))):
            self.pool.publish([block], [10 * chain + i])
            if block not in self.hash_of and self.published(10 * chain + i) is None:
                self.hash_of[block] = 10 * chain + i

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        assert self.pool.num_sole(blocks) == sum(self.users[b] == 1 for b in blocks)
        self.pool.release(blocks)
        for block in reversed(blocks):  # the end first, so that it is also the first to be evicted
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.released_at[block] = next(self.clock)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.references == self.users
        assert self.pool.num_free == len(self.all) - len(self.users)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_prefix_is_evicted_from_its_end() -> None:
    """A chain of four loses its last block first, so that what is left can still be found."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, (7, 8, 9, 10))
    pool.release(blocks)
    left = []
    for _ in range(4):
        pool.allocate(1)
        left.append(len(pool.match((7, 8, 9, 10))))
    assert left == [3, 2, 1, 0]


def test_use_makes_a_prefix_young_again() -> None:
    """Released first but used since: the other chain goes first."""
    pool = BlockPool(2)
    (first,), (second,) = pool.allocate(1), pool.allocate(1)
    pool.publish([first], [1])
    pool.publish([second], [2])
    pool.release([first])
    pool.release([second])
    pool.acquire(pool.match((1,)))
    pool.release([first])
    assert pool.allocate(1) == [second]
    assert pool.match((1,)) == [first]
