"""The exceptions of this package.

The tree::

    SparkDLError
      ConfigError            a setting is invalid or cannot be honoured (also a ValueError)
      ModelError             a model cannot be used on executors, saved or loaded (also a ValueError)
      DataError              rows do not fit the model, or cannot be computed (also a ValueError)
      CheckpointError        another run uses the checkpoint folder
      RuleError              a rule failed on an update
      WireError              bytes are not a message of this protocol
      RefusedError           the endpoint refused a request; carries the HTTP status
      TransportError         a worker cannot reach the endpoint
      ClusterError           Spark cannot run a job or ends it, or the endpoint fails
        PreflightError       an executor does not match the driver, or cannot reach the endpoint
        StaleWorkerError     a Spark Python process is bound to another backend or to other GPUs
      WorkerError            user code or training failed on an executor; carries its traceback
      DivergedError          training diverged: updates are unusable, or ruin the merged weights
      WorkerLostError        an executor or a worker was lost, and no restart is left
      SearchError            no trial of a search succeeded, or its study cannot go on
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
ADVICE = "The same rows and code would fail again. Correct the code at the lines below, or the rows."


class SparkDLError(Exception):
    """Base class of the exceptions that this package defines.

    Attributes:
        cause: the underlying exception, such as Spark's own; it is not printed.
    """

    cause: BaseException | None = None


class ConfigError(SparkDLError, ValueError):
    """A setting is invalid, or cannot be honoured."""


class ModelError(SparkDLError, ValueError):
    """A model cannot be used on executors, saved or loaded.

    For example, it is not compiled, cannot be sent, or uses a feature that workers do not support.
    """


class DataError(SparkDLError, ValueError):
    """Rows do not fit the model, or cannot be computed.

    Attributes:
        reason: the message without lines of the traceback.
        traceback: the traceback of the code that failed on the rows, as text; may be empty.
    """

    def __init__(self, message: str = "", *, traceback: str = "") -> None:
        super().__init__(with_own_lines(message, traceback, others=False))
        self.reason, self.traceback = message, traceback


class CheckpointError(SparkDLError):
    """Another run uses the checkpoint folder, or has taken it over from this run."""


class RuleError(SparkDLError):
    """A rule failed on an update, which was not merged."""


class DivergedError(SparkDLError):
    """Training diverged.

    Workers keep sending NaN, Inf or values that are too large, or merged updates ruin the weights.
    """


class WireError(SparkDLError):
    """Bytes are not a message of this protocol."""


class RefusedError(SparkDLError):
    """The endpoint refused a request.

    Attributes:
        status: the HTTP status, such as 400 (malformed), 401 (no valid token), 409 (an old generation, a
            superseded attempt, or a message that came too late or too early), 410 (the run is over), 413
            (wrong size) or 422 (the layout of a different model, or different rows).
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TransportError(SparkDLError):
    """A worker cannot reach the endpoint."""


class ClusterError(SparkDLError):
    """Spark cannot run a job or ends it, or the endpoint fails."""


class PreflightError(ClusterError):
    """An executor's environment does not match the driver's, or the executor cannot reach the endpoint."""


class StaleWorkerError(ClusterError):
    """A Spark Python process is bound to another backend or to other GPUs; a new process is needed."""


class WorkerError(SparkDLError):
    """User code or training failed on an executor.

    Attributes:
        host: the executor's host name; empty if unknown.
        worker: the index of the worker, and of its partition; -1 if unknown.
        traceback: the worker's traceback as text. The message has only its last two frames: those of user
            code, if there are any.
    """

    def __init__(self, message: str, *, host: str = "", worker: int = -1, traceback: str = "") -> None:
        place = re.search(r" \(worker (\d+)(?: on (\S+))?\)(?=\. )", message)
        super().__init__(with_own_lines(message, traceback, last=message[: place.end()] if place else ""))
        self.host = host or (place[2] if place else None) or ""
        self.worker = int(place[1]) if worker < 0 and place else worker
        self.traceback = traceback

    @classmethod
    def of(cls, reason: str, *, host: str, worker: int, traceback: str = "") -> WorkerError:
        """Return the error for a reason. Its message gives the reason, then the place, then a remedy."""
        place = f" (worker {worker}{f' on {host}' if host else ''})" if worker >= 0 else ""
        message = f"{reason}{place}. {memory.advice(reason) or ADVICE}"
        return cls(message, host=host, worker=worker, traceback=traceback)


class WorkerLostError(SparkDLError):
    """An executor or a worker was lost, and no restart is left.

    For example, its process died, or sent no heartbeat for ``stall_timeout`` seconds.
    """


class SearchError(SparkDLError):
    """No trial of a search succeeded, or its study cannot go on, for example because its storage failed."""


def short(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public function so that errors of this package are raised without internal frames.

    An interrupt is raised in the same way, once and after the cleanup (see ``process.interrupts``). The full
    traceback of an error is logged at DEBUG, by the logger "sparkdl.errors".
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
    """Clear the local variables in the frames of an error and of the errors that caused it.

    Otherwise an error that is kept would also keep the data and the model of its fit in memory. The lines of
    a traceback stay readable.

    Args:
        error: the error.
        handled: the exception that the caller was already handling; it is left alone.
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
