"""Ctrl-C during a call of the public interface: it ends the call once, at a safe point.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. There it could break a lock of
the coordinator, a conversation with the JVM, or the cleanup after an earlier interrupt. Therefore the signal
handler of a call only records the first interrupt, and ``check`` raises it. A call that reaches no ``check``
for a while, as in a long callback, is interrupted where it is. While the call cleans up, further
interrupts are ignored; after GRACE seconds, another interrupt aborts the cleanup.
"""

from __future__ import annotations

import _thread
import functools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
# Seconds after the first interrupt.
SOON = 0.3  # A call that reached no check is interrupted where it is.
LATE = 1.5  # A call in a request to the JVM is interrupted too.
CLEANED = 2.5  # A cleanup stops waiting.
MOMENT = 0.1  # A cleanup waits this long in any case.
GRACE = 10.0  # Another interrupt aborts a cleanup that hangs.
NUDGE_SECONDS = 0.1  # interval at which the handler looks where the main thread is
# Modules with locks that other threads share, or code that acquires a socket, a thread or slots.
LOCKED = {
    "sparkdl.server.coordinator",
    "sparkdl.server.group_coordinator",
    "sparkdl.server.allreduce",
    "sparkdl.driver.remote_server",
    "sparkdl.server.http_app",
    "sparkdl.server.http_server",
    "sparkdl.server.monitoring.record",
    "sparkdl.driver.worker_group",
    "sparkdl.spark.jobs",
}
BUSY = {"py4j", "pyspark", "logging"}  # An exception in these leaves tracebacks or half a message.
# PySpark 3.5 to 4.3: its handler, which cancels all jobs and then raises KeyboardInterrupt.
OF_SPARK = "SparkContext._do_init.<locals>.signal_handler"
OF_PY4J = {  # messages that py4j 0.10.9 logs with a traceback, by logger
    None: "KeyboardInterrupt while sending command.",
    "py4j.clientserver": "Exception occurred while shutting down connection",
}

_guard: _Guard | None = None  # the guard of the main thread's current call


class _Guard:
    """The handler of SIGINT during one call.

    Args:
        handler: the previous handler.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.recorded: BaseException | None = None
        self.since = 0.0
        self.raised = self.reported = self._nudged = self._closed = self._blocked = False
        self.unblock: Callable[[], None] | None = None  # ends a wait of the main thread for the JVM
        self.depth = 0  # number of nested blocks that hold interrupts back
        self._nudging = _thread.allocate_lock()  # held while the nudges go on
        self._nudged_out = _thread.allocate_lock()  # held until they have ended
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Replace the current handler, unless it is this one or the call has ended."""
        handler = signal.getsignal(signal.SIGINT)
        if self._closed:
            return
        if handler != self.on_signal and callable(handler):
            self.handler = handler
            signal.signal(signal.SIGINT, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the first interrupt; raise it if no check did."""
        nudged, self._nudged = self._nudged, False
        if self._closed:  # An interrupt kept close() from restoring the previous handler.
            self.handler(number, frame)
            return
        if self.recorded is None:
            self.recorded = None if nudged else self._raised_by(number, frame)
            if self.recorded is not None:
                self.since = time.monotonic()
                self._nudging.acquire()
                self._nudged_out.acquire()
                # Not threading.Thread: the main thread may hold a lock of that module right now.
                _thread.start_new_thread(self._nudge, ())
            return
        waited = time.monotonic() - self.since
        if self.raised or self.depth:
            if waited > GRACE and not nudged:
                raise self.recorded
        elif waited > SOON:
            self._blocked = _is_busy(frame, late=waited > LATE)
            if not self._blocked:
                self._quieten_py4j()
                self.raised = True
                raise self.recorded

    def _raised_by(self, number: int, frame: FrameType | None) -> BaseException | None:
        """Return the exception that the previous handler raises; None if it raises nothing."""
        if self.handler is signal.default_int_handler or self._is_of_spark:
            return KeyboardInterrupt()
        try:
            self.handler(number, frame)
        except BaseException as raised:  # noqa: BLE001 - the user's handler may raise anything
            return raised
        return None

    @property
    def _is_of_spark(self) -> bool:
        return getattr(self.handler, "__qualname__", "") == OF_SPARK

    def _nudge(self) -> None:
        """Repeat the signal until the interrupt is raised, so that the handler checks the main thread."""
        main = threading.main_thread().ident
        while not self._nudging.acquire(timeout=NUDGE_SECONDS):
            if self._blocked and (unblock := self.unblock) is not None:
                self.unblock = None
                with suppress(Exception):  # The application may have been stopped.
                    unblock()
            if not self.raised and main is not None:
                self._nudged = True
                signal.pthread_kill(main, signal.SIGINT)
        self._nudged_out.release()

    def _quieten_py4j(self) -> None:
        """Suppress the tracebacks that py4j logs.

        py4j logs one of them with ``logging.exception``, which adds a handler to the root logger if that has
        no handler. So the root logger gets a temporary one.
        """
        root = logging.getLogger()
        if not root.handlers and logging.lastResort is not None:
            last = logging.lastResort
            root.addHandler(last)
            self._undo.append(lambda: root.removeHandler(last))

        def others(record: logging.LogRecord) -> bool:
            return record.msg not in OF_PY4J.values()

        for name in OF_PY4J:
            logging.getLogger(name).addFilter(others)
            self._undo.append(functools.partial(logging.getLogger(name).removeFilter, others))

    def say(self) -> None:
        """Log once that the call was interrupted."""
        if self.recorded is not None and not self.reported:
            self.reported = True
            logger.warning("Interrupted: stopping the call and cancelling its Spark job.")

    def close(self) -> None:
        """Restore the previous handler, once no nudge is under way.

        If an interrupt occurs meanwhile, such as in a PySpark handler that hangs, the other steps still run.
        """
        self.depth += 1
        with ExitStack() as steps:
            steps.callback(self._restore)
            steps.callback(self._end_nudges)
            self.say()

    def _end_nudges(self) -> None:
        """End the thread that nudges. Cancel all jobs if the previous handler is PySpark's."""
        if self.recorded is None:
            return
        self._nudging.release()
        self._nudged_out.acquire()
        os.getppid()  # The kernel delivers a pending nudge at the end of any system call.
        if self._is_of_spark:
            try:
                self.handler(signal.SIGINT, None)  # cancels the jobs of other threads
            except BaseException as raised:  # noqa: BLE001 - the interrupt is raised anyway
                logger.debug("PySpark's handler raised %r.", raised)

    def _restore(self) -> None:
        """Restore the previous handler and the logging of py4j."""
        with ExitStack() as steps:
            steps.callback(self._restore_handler)
            for undo in self._undo:
                steps.callback(undo)
            self._undo = []

    def _restore_handler(self) -> None:
        self._closed = True
        if signal.getsignal(signal.SIGINT) == self.on_signal:
            signal.signal(signal.SIGINT, self.handler)


def call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function and return its result; raise an interrupt once, after the cleanup.

    Nested calls, and calls in threads other than the main one, are plain calls. So are all calls while SIGINT
    has no Python handler, and on Windows.
    """
    global _guard
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or _guard is not None or not callable(handler) or not hasattr(signal, "pthread_kill"):
        return function(*args, **kwargs)
    guard = _Guard(handler)
    try:
        _guard = guard
        guard.install()
        result = function(*args, **kwargs)
    except BaseException as error:
        if guard.recorded is None:
            raise
        logger.debug("The interrupted call raised %r.", error)
    finally:
        try:
            guard.close()
        finally:
            _guard = None
    if guard.recorded is not None:
        raise guard.recorded.with_traceback(None) from None
    return result


def check() -> None:
    """Raise the recorded interrupt, unless a cleanup is under way."""
    guard = _of_this_thread()
    if guard is not None and guard.recorded is not None and not guard.depth:
        guard.raised = True
        guard.say()
        raise guard.recorded


def reinstall() -> None:
    """Handle interrupts again after a SparkContext, which installs its own handler, was created."""
    guard = _of_this_thread()
    if guard is not None:
        guard.install()


def limited(seconds: float, *, reserve: float = 0.0) -> float:
    """Return the number of seconds that a cleanup may wait; an interrupt reduces it.

    Args:
        seconds: the time without an interrupt.
        reserve: seconds to leave for the rest of an interrupted call's cleanup.
    """
    guard = _of_this_thread()
    if guard is None or guard.recorded is None:
        return seconds
    return max(0.0, min(seconds, guard.since + CLEANED - reserve - time.monotonic()))


def join(thread: threading.Thread, seconds: float = math.inf, *, reserve: float = 0.0) -> bool:
    """Wait until a thread ends; return True if it has. An interrupt, before or during the wait, limits it.

    Args:
        thread: the thread.
        seconds: the longest wait without an interrupt.
        reserve: seconds to leave for the rest of an interrupted call's cleanup.
    """
    deadline = time.monotonic() + seconds
    thread.join(min(seconds, MOMENT))
    while thread.is_alive() and (left := limited(deadline - time.monotonic(), reserve=reserve)) > 0:
        thread.join(min(left, MOMENT))
    return not thread.is_alive()


def finish(cleanup: Callable[[], object], failure: str) -> None:
    """Call a cleanup; after an interrupt, wait no longer than ``limited`` allows until it returns.

    Args:
        cleanup: the cleanup, which may wait for a file system that does not respond.
        failure: a clause to log, before the reason, if the cleanup fails or does not return in time.
    """

    def run() -> None:
        try:
            cleanup()
        except Exception as error:  # noqa: BLE001 - a local or Hadoop file system may raise anything
            logger.warning("%s: %s", failure, error)

    if _of_this_thread() is None:  # No interrupt comes.
        run()
        return
    thread = threading.Thread(target=run, name="sparkdl-cleanup", daemon=True)
    thread.start()
    if not join(thread):
        logger.warning("%s: the file system does not respond", failure)


@contextmanager
def unblocked_by(unblock: Callable[[], None]) -> Iterator[None]:
    """Call a function from another thread if an interrupt finds the main thread waiting for the JVM.

    Args:
        unblock: the function, which should end the main thread's wait in the ``with`` block.
    """
    guard = _of_this_thread()
    if guard is not None:
        guard.unblock = unblock
    try:
        yield
    finally:
        if guard is not None:
            guard.unblock = None


@contextmanager
def held() -> Iterator[None]:
    """Hold interrupts back in a ``with`` block that cleans up."""
    guard = _of_this_thread()
    if guard is None:
        yield
        return
    guard.depth += 1
    try:
        guard.say()
        yield
    finally:
        guard.depth -= 1


class Cleanup(ExitStack):
    """An ExitStack whose callbacks are not interrupted."""

    def __exit__(self, *details: Any) -> None:
        """Call the callbacks."""
        with held():
            super().__exit__(*details)


def _of_this_thread() -> _Guard | None:
    return _guard if threading.current_thread() is threading.main_thread() else None


def _is_busy(frame: FrameType | None, *, late: bool) -> bool:
    """Return True if an exception must not be raised in a frame.

    Args:
        frame: the current frame of the main thread.
        late: whether a request to the JVM may be interrupted.
    """
    if frame is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        return True
    modules = set()
    while frame is not None:
        modules.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    roots = {name.partition(".")[0] for name in modules}
    return bool(modules & LOCKED) or not late and bool(roots & BUSY)
