"""The driver's side of ``sparkdl.run``, which runs a user's function on every worker of a group."""

from __future__ import annotations

import inspect
import secrets
import sys
from collections.abc import Callable
from typing import Any

from sparkdl.config import TrainConfig
from sparkdl.driver.serving import serving
from sparkdl.driver.worker_group import POLL_SECONDS, WorkerGroup
from sparkdl.errors import ConfigError, short
from sparkdl.process.interrupts import Cleanup
from sparkdl.server.allreduce import AllReduceCoordinator
from sparkdl.server.http_app import Traffic
from sparkdl.settings import FaultTolerance, Network, with_deprecated
from sparkdl.spark import jobs, preflight
from sparkdl.spark.application import application_of
from sparkdl.spark.failures import explained_if_stopped
from sparkdl.spark.jobs import SparkJob, StageFactory
from sparkdl.worker.collective import WorkerContext
from sparkdl.worker.tasks import FunctionTask


@short
def run(
    function: Callable[[WorkerContext], Any],
    num_workers: int | None = None,
    *,
    network: Network | None = None,
    start_timeout: float = FaultTolerance.start_timeout,
    **deprecated: Any,
) -> list[Any]:
    """Run a function of your own, which needs no model, on all workers at the same time.

    Args:
        function: a function of a ``WorkerContext`` (``rank``, ``size``, ``device``, ``all_reduce`` and
            ``barrier``) that returns a value that can be pickled. Objects that it uses are sent with it.
        num_workers: the number of workers; None takes all slots.
        network: the address, the port and the encryption of the endpoint.
        start_timeout: as in ``FaultTolerance``, in seconds.
        deprecated: the fields of ``network`` as separate arguments, which issue a DeprecationWarning.

    Returns:
        The function's result on each worker, in the order of ranks.

    Raises:
        ConfigError: an argument cannot be honoured, or the session is one of Spark Connect.
        ClusterError: there are too few slots, workers did not start in time, or the job was cancelled.
        PreflightError: an executor's environment does not match the driver's, or an executor cannot reach
            the endpoint.
        WorkerError: the function failed on a worker (the error has its traceback), or returned on a worker
            that others wait for in ``all_reduce`` or ``barrier``.
        WorkerLostError: a worker died. The function is not restarted, because only it knows its progress.

    Example:
        >>> sparkdl.run(lambda worker: float(worker.all_reduce(worker.rank)), num_workers=2)  # doctest: +SKIP
        [0.5, 0.5]
    """
    config = TrainConfig(
        num_workers=num_workers,
        fault_tolerance=FaultTolerance(start_timeout=start_timeout),
        **with_deprecated("sparkdl.run", {"network": network}, deprecated),
    )
    _require_one_argument(function)
    cluster = application_of(own_gpus=True)
    context = cluster.context  # raises ConfigError over Spark Connect
    with Cleanup() as stack:
        stack.enter_context(explained_if_stopped(cluster))
        cluster.require_python(_backend())
        num_workers, why = cluster.num_workers(config.num_workers, None, start_timeout)
        jobs.logger.info("%d workers: %s.", num_workers, why)
        coordinator = AllReduceCoordinator(secrets.token_bytes(16), num_workers)
        stack.enter_context(jobs.claim(cluster, num_workers))
        endpoint = stack.enter_context(serving(coordinator, cluster, config.network, Traffic()))
        tasks = context.parallelize(range(num_workers), num_workers)
        expected = preflight.expectations(_backend(), local=cluster.local)

        def submit(generation: int, barrier: bool) -> SparkJob:
            stages = StageFactory(
                expected=expected, endpoint=endpoint, generation=generation, profile=cluster.profile
            )
            stage = stages.make(FunctionTask(function, num_workers))
            text = f"sparkdl: run {getattr(function, '__name__', 'a function')}"
            return SparkJob(cluster, jobs.run_rdd(tasks, stage, barrier=barrier), text)

        group = WorkerGroup(
            cluster=cluster,
            coordinator=coordinator,
            submit=submit,
            barrier=not cluster.dynamic,
            restarts=0,
            start_timeout=start_timeout,
        )
        stack.callback(group.cancel)
        return _results(group)


def _results(group: WorkerGroup) -> list[Any]:
    """Start a worker group and return the results of its workers."""
    group.start()
    while True:
        job = group.job
        if job is not None and job.wait(POLL_SECONDS) and job.error is None:
            group.finish()
            return list(job.result)
        group.check()


def _require_one_argument(function: Callable[[WorkerContext], Any]) -> None:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "function should take one argument, the worker's context; got "
            f"{getattr(function, '__name__', function)!r}: {error}."
        ) from None


def _backend() -> str | None:
    """Return the Keras backend if this process has imported Keras; executors must then have it too."""
    keras = sys.modules.get("keras")
    return str(keras.backend.backend()) if keras is not None else None
