"""Everything this package raises on purpose.

The tree::

    SparkDLError
      ConfigError            a run was asked for that cannot be run (also a ValueError)
      ModelError             a model that cannot be shipped to executors as it is (also a ValueError)
      DataError              rows that do not fit the model (also a ValueError)
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


class SparkDLError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SparkDLError, ValueError):
    """A run was asked for that cannot be run."""


class ModelError(SparkDLError, ValueError):
    """A model cannot be shipped to executors as it is."""


class DataError(SparkDLError, ValueError):
    """Rows do not fit the model."""


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
        traceback: the worker's traceback as text.
    """

    def __init__(self, message: str, *, host: str = "", worker: int = -1, traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{traceback}" if traceback else message)
        self.host, self.worker, self.traceback = host, worker, traceback


class WorkerLostError(SparkDLError):
    """An executor or its Python process died more often than is allowed."""
