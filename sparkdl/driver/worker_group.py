"""The worker group of a run: the job that runs the workers, and its restarts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkdl.driver.remote_server import RemoteCoordinator
from sparkdl.errors import ClusterError, SparkDLError, StaleWorkerError, WorkerLostError
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.server.monitoring.live import no_event
from sparkdl.spark import failures
from sparkdl.spark.application import SparkApplication
from sparkdl.spark.jobs import SparkJob
from sparkdl.spark.slots import NOTICE_SECONDS

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5  # between two checks of the tasks of missing workers
FINISH_SECONDS = 30.0  # the time that tasks may take to end after the last epoch
LOST_SECONDS = 3.0  # the same if a worker is lost, because its task may never end


@dataclass(kw_only=True)
class WorkerGroup:
    """The workers of a run: the job that runs them, and its restart when a worker is lost.

    Attributes:
        cluster: the Spark application.
        coordinator: the run's coordinator, or the driver's view of the coordinator in worker 0.
        submit: the function that submits the job of a generation, as a barrier stage or not.
        barrier: whether the job is a barrier stage.
        restarts: the maximum number of consecutive restarts; a completed epoch resets the count.
        start_timeout: the maximum seconds between the starts of the first and the last worker.
        address: the URL of the endpoint; None if it is in worker 0.
        on_event: a function of the text and the level of an event, which records it.
        of_rows: whether the job computes the rows from the user's own RDD or DataFrame.
        waiting: the state of workers that do not train yet, or the reason why they have not started.
    """

    cluster: SparkApplication
    coordinator: GroupCoordinator | RemoteCoordinator
    submit: Callable[[int, bool], SparkJob]
    barrier: bool
    restarts: int
    start_timeout: float
    address: str | None = None
    on_event: Callable[[str, str], object] = no_event
    of_rows: bool = False
    job: SparkJob | None = None
    failures: int = 0
    shipped: bool = False
    stale: int = 0
    started: float = field(default_factory=time.monotonic)
    noticed: float = field(default_factory=time.monotonic)
    looked: float = 0.0
    waiting: str = ""
    logged: str = ""
    forming: float | None = None
    formed: bool = False

    @property
    def most_stale(self) -> int:
        """The maximum number of restarts because of stale Python processes."""
        return 3 * self.coordinator.shape.num_workers

    def start(self) -> None:
        """Submit the job of the present generation."""
        self.started = self.noticed = time.monotonic()
        self.forming, self.formed, self.logged = None, False, ""
        self.job = self.submit(self.coordinator.generation, self.barrier)

    def check(self) -> None:
        """Check the workers once, and restart them after a failure that a restart can fix.

        Raises:
            SparkDLError: a worker failed, workers died too often, or workers did not start in time.
        """
        self._relay_logs()
        if self.coordinator.failure is not None:
            self._failed(self.coordinator.failure)
        elif self.job is not None and not self.job.running:
            self._ended(self.job)
        elif not self.formed:
            self._watch_forming()

    def _relay_logs(self, *, last: bool = False) -> None:
        for entry in self.coordinator.take_log(last=last):
            workers = logging.getLogger(f"sparkdl.workers.{entry['name']}")
            workers.log(entry["level"], "%s", entry["message"])
            self.on_event(entry["message"], logging.getLevelName(entry["level"]).lower())

    def _ended(self, job: SparkJob) -> None:
        time.sleep(POLL_SECONDS)  # A worker reports its failure just before its task fails.
        if self.coordinator.failure is not None:
            self.coordinator.failure.cause = job.error
            self._failed(self.coordinator.failure)
        elif job.error is not None:
            self._failed(failures.explain(job.error, self.cluster, of_rows=self.of_rows))
        # With placement="worker" the result is True once the record of worker 0 has arrived.
        elif not job.result:
            raise WorkerLostError("The Spark job ended before the run was complete.")

    def _failed(self, error: SparkDLError) -> None:
        """Restart the workers if that can fix the error, else raise it."""
        self._relay_logs(last=True)
        if isinstance(error, WorkerLostError | StaleWorkerError) and self.cluster.stopped:
            raise failures.explain(error, self.cluster) from None
        if failures.lacks_package(error) and not self.shipped:
            logger.info("sparkdl is not installed on the executors; sending them a copy.")
            self.cancel()
            self.cluster.ship_package()
            self.shipped = True
        elif isinstance(error, StaleWorkerError) and self.stale < self.most_stale:
            logger.info("%s A new process replaces it.", error)
            self.stale += 1
            self.cancel()
        elif self.barrier and failures.refuses_barrier(error):
            logger.info("Spark cannot compute these rows in a barrier stage; starting workers without one.")
            self.barrier = False
            self.cancel()
        elif isinstance(error, WorkerLostError) and self.failures < self.restarts:
            self.failures += 1
            self.coordinator.restarts += 1
            self.cancel()
            self.coordinator.restart()
            text = (
                f"A worker was lost; the workers restart ({self.failures} of {self.restarts}) and continue "
                f"{self.coordinator.restart_point}: {str(error).splitlines()[0][:300]}"
            )
            logger.warning("%s", text)
            self.on_event(text, "warning")
            self.start()
            return
        else:
            raise error from None
        self.coordinator.restart()
        self.start()

    def _watch_forming(self) -> None:
        missing = self.coordinator.missing()
        now = time.monotonic()
        total = self.coordinator.shape.num_workers
        if not missing:
            self.formed, self.waiting = True, "the workers are storing their rows"
            if self.address is None:  # the endpoint in worker 0 does not report which workers have joined
                self.waiting = "the workers are starting or storing their rows"
            return
        if len(missing) < total:
            self.forming = self.forming or now
            if now - self.forming > self.start_timeout:
                raise ClusterError(
                    f"Only {total - len(missing)} of {total} workers started within {self.start_timeout:g} "
                    f"s; missing: {', '.join(map(str, missing))}. Other jobs may occupy the slots. Use "
                    "fewer workers, or raise start_timeout."
                )
        self._say_why(now, f"{len(missing)} of {total} workers")

    def _say_why(self, now: float, missing: str) -> None:
        """Find out why workers are missing, and log a new reason.

        The reason is looked up at most every LOOK_SECONDS, and logged at most every NOTICE_SECONDS.
        """
        if now - self.looked < LOOK_SECONDS or self.job is None:
            return
        self.looked, wait = now, self.job.waits_for()
        self.waiting = f"waiting for {missing}: {wait.reason}"
        if now - self.noticed > NOTICE_SECONDS and self.waiting != self.logged:
            self.noticed, self.logged = now, self.waiting
            logger.log(
                logging.WARNING if wait.for_slots else logging.INFO,
                "Still waiting for %s to start after %.0f s: %s.",
                missing,
                now - self.started,
                wait.reason,
            )

    def finish(self) -> None:
        """Wait for the end of the job after the last epoch, and cancel it if it does not end."""
        patience = LOST_SECONDS if self.coordinator.lost else FINISH_SECONDS
        if self.job is not None and not self.job.wait(patience):
            self.job.cancel()
        self._relay_logs(last=True)

    def cancel(self) -> None:
        """Cancel the job."""
        if self.job is not None:
            self.job.cancel()
