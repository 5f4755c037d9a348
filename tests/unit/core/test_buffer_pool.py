"""Tests of the pool of memory: memory in use is never lent again, and unused memory is."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.buffer_pool import SMALL, SPARE, BufferPool
from sparkdl.core.vectors import ALIGNMENT, address

VIEWS = {
    "itself": lambda lent: lent,
    "slice": lambda lent: lent[1:-1],
    "another dtype": lambda lent: lent[: SMALL // 4 * 4].view(np.float32),
    "another shape": lambda lent: lent[: SMALL // 4 * 4].reshape(4, -1)[2],
    "memoryview": memoryview,
    "bytes of a view": lambda lent: memoryview(lent[8:]).cast("B").toreadonly(),
    "array of a memoryview": lambda lent: np.frombuffer(memoryview(lent)[4:], np.uint8),
}


def place(view):
    """Return the address and the size of the memory of a view."""
    array = np.frombuffer(view, np.uint8) if isinstance(view, memoryview) else view
    return array.__array_interface__["data"][0], array.nbytes


@given(st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 2), st.integers(0, 5)), max_size=20))
def test_memory_in_use_is_not_lent_again(steps):
    """Memory that any kind of view refers to does not overlap with memory that is lent later."""
    pool, used = BufferPool(), []
    for view, larger, dropped in steps:
        used.append(VIEWS[view](pool.borrow(SMALL + larger)))
        places = sorted(map(place, used))
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))
        used = used[dropped:]


@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_lent_again_once_nothing_refers_to_it(view):
    """Memory is lent again when its last view ends, and not before."""
    pool = BufferPool()
    lent = pool.borrow(SMALL)
    first, kept = address(lent), VIEWS[view](lent)
    del lent
    other = pool.borrow(SMALL)
    assert first != address(other)

    del kept
    assert first == address(pool.borrow(SMALL))


def test_unused_memory_is_bounded():
    """The pool keeps at most SPARE unused pieces of memory, all of the size borrowed last."""
    pool = BufferPool()
    lent = [pool.borrow(SMALL) for _ in range(10)]
    del lent
    lent = pool.borrow(SMALL)
    assert 1 + SPARE == len(pool._known)

    del lent
    lent = pool.borrow(2 * SMALL)
    assert 2 * SMALL == len(lent)
    assert 1 == len(pool._known)


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, 3 * SMALL + 1])
def test_memory_has_the_size_and_alignment_that_was_asked_for(size):
    """Memory is writeable and aligned, new and reused."""
    pool = BufferPool()
    for _ in range(2):
        lent = pool.borrow(size)
        lent[...] = 1
        assert size == lent.nbytes
        assert not size or 0 == address(lent) % ALIGNMENT
        del lent


def test_an_array_is_borrowed_like_another():
    """borrow_like returns an array of the same shape and dtype."""
    like = np.zeros((SMALL, 2), np.float32)
    lent = BufferPool().borrow_like(like)

    assert (like.shape, like.dtype) == (lent.shape, lent.dtype)


def test_threads_never_share_memory():
    """Several threads that borrow at the same time get memory of their own."""
    pool, mixed = BufferPool(), []

    def run(number):
        for _ in range(30):
            lent = pool.borrow(SMALL)
            lent[...] = number
            mixed.extend(set(np.unique(lent).tolist()) - {number})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == mixed
