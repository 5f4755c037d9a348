"""Everything this package raises on purpose.

The tree::

    SparkDLError
      ConfigError            a run was asked for that cannot be run (also a ValueError)
      ModelError             a model that cannot be shipped to executors as it is (also a ValueError)
      DataError              rows that do not fit the model (also a ValueError)
      CheckpointError        another run writes to the folder of checkpoints
      RuleError              a rule failed on an update
      WireError              bytes that are not a message of this protocol
      RefusedError           the endpoint will not take a request; carries the HTTP status
      TransportError         a worker cannot reach the driver's endpoint
      ClusterError           Spark cannot give the workers that were asked for, or takes them away
        PreflightError       an executor's environment does not match the driver's
        StaleWorkerError     a Python process of Spark's is bound to another backend, or to other GPUs
      WorkerError            user code or training failed on an executor; carries its traceback
      DivergedError          workers go on sending NaN or Inf, or their updates throw the center away
      WorkerLostError        an executor or its Python process died more often than is allowed
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sparkdl.process import interrupts, memory
from sparkdl.process.reasons import with_own_lines

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
ADVICE = "The same rows and code would fail again: correct the code at the lines below, or the rows."


class SparkDLError(Exception):
    """Base of everything this package raises on purpose.

    Attributes:
        cause: the exception that it stands for, such as Spark's own; it is not printed.
    """

    cause: BaseException | None = None


class ConfigError(SparkDLError, ValueError):
    """A run was asked for that cannot be run."""


class ModelError(SparkDLError, ValueError):
    """A model cannot be shipped to executors as it is."""


class DataError(SparkDLError, ValueError):
    """Rows do not fit the model, or cannot be computed.

    Attributes:
        reason: the message without lines of the traceback.
        traceback: that of the user's function which computes rows, as text; empty without one.
    """

    def __init__(self, message: str = "", *, traceback: str = "") -> None:
        super().__init__(with_own_lines(message, traceback, others=False))
        self.reason, self.traceback = message, traceback


class CheckpointError(SparkDLError):
    """Another run writes to the folder of checkpoints, or has taken it over from this one."""


class RuleError(SparkDLError):
    """A rule failed on an update, which was not merged."""


class DivergedError(SparkDLError):
    """Training diverged: workers send numbers that are none, or their updates throw the center away."""


class WireError(SparkDLError):
    """Bytes are not a message of this protocol."""


class RefusedError(SparkDLError):
    """The endpoint will not take a request.

    Attributes:
        status: the HTTP status that says why: 400 malformed, 401 no token, 409 an old generation or
            a superseded attempt, 410 the run is over, 413 too large, 422 another model's layout.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TransportError(SparkDLError):
    """A worker cannot reach the driver's endpoint."""


class ClusterError(SparkDLError):
    """Spark cannot give the workers that were asked for, or takes them away."""


class PreflightError(ClusterError):
    """An executor's environment does not match the driver's."""


class StaleWorkerError(ClusterError):
    """A Python process of Spark's is bound to another backend, or to other GPUs; a fresh one is not."""


class WorkerError(SparkDLError):
    """Training failed on an executor.

    Attributes:
        host: the executor's host name.
        worker: the index of the worker, which is also that of its partition.
        traceback: the worker's traceback as text; the message has its lines of the user's own code.
    """

    def __init__(self, message: str, *, host: str = "", worker: int = -1, traceback: str = "") -> None:
        place = re.search(r" \(worker (\d+)(?: on (\S+))?\)(?=\. )", message)
        super().__init__(with_own_lines(message, traceback, last=message[: place.end()] if place else ""))
        self.host = host or (place[2] if place else None) or ""
        self.worker = int(place[1]) if worker < 0 and place else worker
        self.traceback = traceback

    @classmethod
    def of(cls, reason: str, *, host: str, worker: int, traceback: str = "") -> WorkerError:
        """Return the error for a reason: it says that first, then where it was, then what to do."""
        place = f" (worker {worker}{f' on {host}' if host else ''})" if worker >= 0 else ""
        message = f"{reason}{place}. {memory.advice(reason) or ADVICE}"
        return cls(message, host=host, worker=worker, traceback=traceback)


class WorkerLostError(SparkDLError):
    """An executor or its Python process died more often than is allowed."""


def short(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of the public interface raise errors of this package without the frames inside it.

    An interrupt is raised in the same way, once and after the cleanup (see ``process.interrupts``). The whole
    traceback of an error is logged at DEBUG, to the logger "sparkdl.errors".
    """

    @functools.wraps(function)
    def shortened(*args: P.args, **kwargs: P.kwargs) -> R:
        raised: BaseException
        handled = sys.exception()
        try:
            return interrupts.call(function, *args, **kwargs)
        except SparkDLError as error:
            logger.debug("%s", error, exc_info=True)
            error.cause = error.cause or error.__cause__
            _clear_frames(error, handled)
            raised = error.with_traceback(None)
        except KeyboardInterrupt as error:
            _clear_frames(error, handled)
            raised = error.with_traceback(None)
        raise raised from None

    return shortened


def _clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Clear the local variables of the frames that an error, and those which it stands for, came through.

    An error that is kept would keep the data and the model of its fit with them. The lines of a traceback
    stay readable.

    Args:
        error: the error.
        handled: the exception that the caller was handling before; it is left alone.
    """
    seen, left = {id(handled)}, [error]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        of_ours = one.cause if isinstance(one, SparkDLError) else None
        left += [each for each in (of_ours, one.__cause__, one.__context__) if each is not None]
