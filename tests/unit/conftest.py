"""Fixtures of the unit tests, which use no Keras and no JVM and leave no thread behind."""

import threading

import hypothesis
import pytest
from leaks import leaked_threads

hypothesis.settings.register_profile("sparkdl", deadline=None, max_examples=50)
hypothesis.settings.load_profile("sparkdl")


@pytest.fixture(autouse=True)
def no_leaked_threads():
    """Fail a test that leaves a thread running."""
    before = threading.enumerate()
    yield

    assert [] == leaked_threads(before)
