"""Rows that a user's function returns on each worker, where they stay."""

from __future__ import annotations

import inspect

from pyspark import RDD

from sparkdl.data.schema import Counts, Sample
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_settings
from sparkdl.sources.base import Action, MakeAction, NoRowsError, Source
from sparkdl.spark import jobs, preflight
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.jobs import StageFactory
from sparkdl.worker.task_rows import FunctionRows, RowFunction
from sparkdl.worker.tasks import EvaluateTask, FirstRowTask, TrainTask


class FunctionSource(Source):
    """The rows that a user's function returns on each worker.

    Args:
        function: a function that takes the index of a worker and the number of workers, and returns
            data that Keras's ``fit`` takes.
        counts: the number of arrays that the model takes for x and for y.
        labels: whether rows must have labels.

    Raises:
        ConfigError: the function does not take two arguments.
    """

    kind = partners = "a function"

    def __init__(self, function: RowFunction, counts: Counts, *, labels: bool = True) -> None:
        self.function, self.counts, self.labels = function, counts, labels
        try:
            inspect.signature(function).bind(0, 1)
        except (TypeError, ValueError) as error:  # ValueError: its signature is not known
            raise ConfigError(
                "The function that reads the rows should take two arguments, the index of a worker and the "
                f"number of workers; got {getattr(function, '__name__', function)!r}: {error}."
            ) from None

    def peek(self) -> Sample:
        """Return the first row of worker 0, from a job of one task that calls the function."""
        cluster = application_of()
        expected = preflight.expectations(keras_settings.backend(), local=cluster.local)
        task = FirstRowTask(self.function, self.workers, self.counts, self.labels)
        stage = StageFactory(expected=expected).make(task)
        action = jobs.run_rdd(self._tasks(cluster, 1), stage, barrier=False)
        text = f"sparkdl: first row for {self.model_name}"
        rows = jobs.run(action, cluster, of_rows=False, description=text)
        if not rows:
            raise NoRowsError("There are no rows: the function returned no rows for worker 0.")
        return rows[0]

    @staticmethod
    def _tasks(cluster: SparkApplication, count: int) -> RDD[int]:
        rdd: RDD[int] = cluster.context.parallelize(range(count), count)
        return rdd

    def training(
        self,
        cluster: SparkApplication,
        num_workers: int,
        *,
        seed: int | None,
        validation: Source | None,
        split: float,
    ) -> MakeAction:
        """Return a factory of training jobs. The tasks of such a job call the user's function."""
        held = (validation.function, validation.schema) if isinstance(validation, FunctionSource) else None
        rows = FunctionRows(
            schema=self.schema,
            function=self.function,
            workers=num_workers,
            held=held,
            split=split,
            split_seed=seed or 0,
        )

        def make(stages: StageFactory, barrier: bool) -> Action:
            train = stages.make(TrainTask(stages.code, rows))
            return jobs.run_rdd(self._tasks(cluster, num_workers), train, barrier=barrier)

        return make

    def evaluation(self, cluster: SparkApplication, stages: StageFactory) -> list[tuple[bytes, int]]:
        """Run an evaluation job; return the metric states and row count of each task with rows."""
        rows = FunctionRows(schema=self.schema, function=self.function, workers=self.workers)
        stage = stages.make(EvaluateTask(stages.code, rows))
        action = jobs.run_rdd(self._tasks(cluster, self.workers), stage, barrier=False)
        return jobs.run(
            action, cluster, of_rows=self.of_a_plan, description=f"sparkdl: evaluate {self.model_name}"
        )
