"""The driver's side of ``sparkdl.run``: a function of the user's on every worker of a group."""

from __future__ import annotations

import inspect
import secrets
import sys
from collections.abc import Callable
from typing import Any

from sparkdl.config import TrainConfig
from sparkdl.driver.worker_group import POLL_SECONDS, WorkerGroup, serving
from sparkdl.errors import ConfigError, short
from sparkdl.process.interrupts import Cleanup
from sparkdl.server.allreduce import AllReduceCoordinator
from sparkdl.server.http_app import Traffic
from sparkdl.spark import jobs, preflight
from sparkdl.spark.application import application_of
from sparkdl.spark.jobs import Job, Stage
from sparkdl.worker.collective import WorkerContext


@short
def run(
    function: Callable[[WorkerContext], Any],
    num_workers: int | None = None,
    *,
    bind_address: str | None = None,
    advertised_host: str | None = None,
    port: int | range | str = 0,
    tls: bool | None = None,
    start_timeout: float = 300,
) -> list[Any]:
    """Run a function of your own on every worker at once; it needs no model.

    Args:
        function: takes a ``WorkerContext``, with ``rank``, ``size``, ``device``, ``all_reduce`` and
            ``barrier``, and returns what can be pickled. What it uses of the driver's program goes with it.
        num_workers: how many workers; None takes the slots that there are.
        bind_address: as of ``SparkModel``.
        advertised_host: as of ``SparkModel``.
        port: as of ``SparkModel``.
        tls: as of ``SparkModel``.
        start_timeout: as of ``SparkModel``.

    Returns:
        What the function returned on each worker, in the order of their ranks.

    Raises:
        ConfigError: an argument that cannot be honoured.
        ClusterError: too few slots, an executor whose environment does not match, or somebody cancelled the
            job.
        WorkerError: the function failed on a worker, whose traceback it carries, or returned while others
            wait for it.
        WorkerLostError: a worker died. Nothing is run again, for nobody but the function knows where it was.

    Example:
        >>> sparkdl.run(lambda worker: worker.all_reduce(worker.rank), num_workers=2)  # doctest: +SKIP
        [0.5, 0.5]
    """
    config = TrainConfig(
        num_workers=num_workers,
        bind_address=bind_address,
        advertised_host=advertised_host,
        port=port,  # type: ignore[arg-type]
        tls=tls,
        start_timeout=start_timeout,
    )
    _require_one_argument(function)
    cluster = application_of(own_gpus=True)
    context = cluster.context  # which says so where there is none
    cluster.require_python(_backend())
    num_workers, why = cluster.num_workers(config.num_workers, None, config.start_timeout)
    jobs.logger.info("%d workers: %s.", num_workers, why)
    store = AllReduceCoordinator(secrets.token_bytes(16), num_workers)
    with Cleanup() as stack:
        stack.enter_context(jobs.claim(cluster, num_workers))
        endpoint = stack.enter_context(serving(store, cluster, config, Traffic()))
        tasks = context.parallelize(range(num_workers), num_workers)
        expected = preflight.expectations(_backend(), local=cluster.local)

        def submit(generation: int, barrier: bool) -> Job:
            stage = Stage(
                "run",
                expected,
                endpoint=endpoint,
                generation=generation,
                function=function,
                workers=num_workers,
                profile=cluster.profile,
            )
            return Job(cluster, jobs.run_rdd(tasks, stage, barrier=barrier))

        group = WorkerGroup(
            cluster=cluster,
            store=store,
            submit=submit,
            barrier=not cluster.dynamic,
            restarts=0,
            start_timeout=config.start_timeout,
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
            "run should be given a function that takes one argument, the worker's context; got "
            f"{getattr(function, '__name__', function)!r}: {error}."
        ) from None


def _backend() -> str | None:
    """Return the backend of Keras if it was imported here; functions that use Keras then have it too."""
    keras = sys.modules.get("keras")
    return str(keras.backend.backend()) if keras is not None else None
