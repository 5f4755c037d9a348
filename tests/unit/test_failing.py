"""The fault injection makes exactly the chosen call fail, once."""

import threading

import pytest
from failing import FAILURES, Failing

from sparkdl.server import state

SITE = "sparkdl/server/state.py _mapped: "
CALLS = {
    "ENOSPC": "file.write",
    "EIO": "file.flush",
    "ETIMEDOUT": "file.write",
    "EMFILE": "mmap.new",
    "MemoryError": "mmap.new",
}


def file():
    return bytes(state.in_file(b"x" * (state.IN_MEMORY + 1)))


def test_sites_are_found():
    """Watched sites are counted."""
    with Failing() as watched:
        file()
        file()

    assert {2} == {watched.sites[SITE + call] for call in CALLS.values()}


@pytest.mark.parametrize("kind", CALLS)
def test_the_call_that_is_meant_fails(kind):
    """With number=1 the second call fails, and the first and the third succeed."""
    outcomes = []

    def work():
        for _ in range(3):
            try:
                outcomes.append(len(file()))
            except (OSError, MemoryError) as error:
                outcomes.append(repr(error))

    with Failing(SITE + CALLS[kind], kind, 1) as watched:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    whole = state.IN_MEMORY + 1
    assert [whole, repr(FAILURES[kind][0]()), whole] == outcomes
    assert watched.failed


def test_an_interrupt_comes_to_the_main_thread():
    """An injected interrupt reaches the main thread, as Ctrl-C does."""
    with pytest.raises(KeyboardInterrupt), Failing(SITE + "file.write", "SIGINT"):
        file()
