"""Fits that run side by side: their settings, seeds, callbacks and threads.

Fits of one driver may run at the same time: each has its own endpoint, and takes its own slots. A thread of
the driver runs each of them.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from sparkdl.core.validation import whole_number
from sparkdl.driver.epochs import check_callbacks
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_internals
from sparkdl.modeling.keras_settings import alone
from sparkdl.modeling.keras_types import Callback
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.process.reasons import reason_of
from sparkdl.spark.application import SparkApplication

POLL_SECONDS = 0.1
STOP_SECONDS = 60.0  # the time that fits may take to end after one has failed, or after Ctrl-C


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a SparkModel that is one of several, with the defaults of fits side by side.

    Args:
        given: the settings that the user gave.

    Raises:
        ConfigError: ``num_workers`` is not a whole number of at least 1.
    """
    settings = {"num_workers": 1, "dashboard": False} | dict(given)
    alone = whole_number("num_workers", settings["num_workers"]) == 1
    return {"frequency": "epoch" if alone else "batch"} | settings  # a single worker need not exchange


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make the random choices of a function that builds a model reproducible in a ``with`` block.

    Keras's initializers and layers without a seed draw one from Python's random generator. The states of the
    global generators are restored afterwards.
    """
    with alone():
        set_seed(seed)
        yield


def set_seed(seed: int) -> None:
    """Set the seeds of the global random generators, from which Keras draws those of initial weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_states() -> Iterator[None]:
    """Restore the states of the global random generators after a ``with`` block."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def own_callbacks(callbacks: object, same: Mapping[int, object] = MappingProxyType({})) -> list[Callback]:
    """Return copies of the user's callbacks, since a callback has the state and the model of one fit.

    Args:
        callbacks: the callbacks.
        same: by the ``id`` of an object that a callback may refer to, the object that its copy refers to.

    Raises:
        ConfigError: one is not a Keras callback, or cannot be copied.
    """
    copies = []
    for given in check_callbacks(callbacks):
        try:
            made = copy.copy(given)
            keras_internals.forget_model(made)
            copies.append(copy.deepcopy(made, dict(same)))
        except Exception as error:
            raise ConfigError(
                f"callbacks should be copyable, because each of several fits gets a copy; "
                f"{type(given).__name__} is not: {reason_of(error)}"
            ) from error
    return copies


def run_threads(
    cluster: SparkApplication,
    work: Callable[[], object],
    count: int,
    *,
    name: str,
    stop: Callable[[], object],
    failed: Callable[[], bool],
    idle: Callable[[float], object] = time.sleep,
) -> None:
    """Call a function in several threads, and wait until all calls have ended.

    The threads have Keras's default dtype policy of this thread. Keras keeps it by thread.

    Args:
        cluster: the Spark application.
        work: the function. It raises nothing.
        count: the number of threads.
        name: the name of the threads, before a number.
        stop: asks the calls to end soon. It is called until they have, if one failed or after Ctrl-C.
        failed: returns True if the calls should end.
        idle: called by this thread while it waits, with a number of seconds.
    """
    policy = keras.config.dtype_policy()

    def begin() -> None:
        keras.config.set_dtype_policy(policy)
        work()

    threads = [cluster.thread(begin, f"{name}-{number}") for number in range(count)]
    with Cleanup() as stack:
        stack.callback(_end, threads, stop)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            idle(POLL_SECONDS)
            interrupts.check()
            if failed():
                stop()


def _end(threads: list[threading.Thread], stop: Callable[[], object]) -> None:
    """Ask the calls in threads to end, until they have, for at most STOP_SECONDS."""
    deadline = time.monotonic() + STOP_SECONDS
    for thread in threads:
        while thread.is_alive() and (left := interrupts.limited(deadline - time.monotonic())) > 0:
            stop()
            thread.join(min(POLL_SECONDS, left))
