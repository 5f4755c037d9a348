"""Process-wide settings of Keras, and the lock for fits that change them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from sparkdl.process import interrupts


def backend() -> str:
    """Return the name of Keras's backend."""
    return str(keras.backend.backend())


def float_type() -> str:
    """Return Keras's default float type."""
    return str(keras.config.floatx())


_alone = threading.RLock()  # for fits in several threads: Keras's float type and policy are process-wide


@contextmanager
def alone() -> Iterator[None]:
    """Let one thread at a time serialize or restore a model.

    The states of Python's and NumPy's global random generators are restored afterwards, because making a
    model may draw from them. For example, Keras's initializers without a seed draw it from Python's.
    """
    with _alone:
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            with interrupts.held():
                random.setstate(states[0])
                np.random.set_state(states[1])


def set_defaults(floatx: str, policy: Any, data_format: str) -> None:
    """Set the default float type, dtype policy and image format of this process."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    keras.config.set_image_data_format(data_format)
