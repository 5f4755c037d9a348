"""The kinds of tasks that run on executors.

Each kind is a frozen dataclass. The driver makes an instance for the tasks of one stage, and sends it to the
executors. Large values that all tasks share come separately, as ``TaskCall.shared``. Each task calls the
instance's ``run`` after the preflight.

``run`` takes the task's iterator and always drains it: Spark ends a Python worker that leaves rows unread,
and every compiled function is lost with it.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from sparkdl.data.arrays import as_rows
from sparkdl.data.bad_values import Faults, Watched
from sparkdl.data.blocks import EMPTY, TRAINING, Block, deal
from sparkdl.data.schema import Counts, Sample
from sparkdl.errors import DataError, SparkDLError, WorkerError
from sparkdl.process.reasons import reason_of
from sparkdl.transport import client
from sparkdl.transport.exchange import Endpoint
from sparkdl.worker.collective import WorkerContext, run_task
from sparkdl.worker.session import Attempt
from sparkdl.worker.task_rows import RddRows, RowFunction, TaskRows, computed, parts_made
from sparkdl.worker.user_code import Code

if TYPE_CHECKING:  # these import pyarrow, or Keras, which needs the task's devices set up first
    from sparkdl.data.arrow import RecordBatch
    from sparkdl.data.decoding import Decode
    from sparkdl.modeling.classification import OutputKind, Shapes
    from sparkdl.worker.inference import InferenceJob
    from sparkdl.worker.train import TrainJob

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class TaskCall:
    """One call of a task by Spark.

    Attributes:
        context: Spark's TaskContext; a BarrierTaskContext in a barrier stage.
        endpoint: the run's endpoint, if there is one.
        generation: the number of the generation (the start of the worker group) that the task belongs to.
        shared: holds the values that all tasks share, as ``value``: a broadcast variable, or a
            ``preflight.Shared``.
    """

    context: Any
    endpoint: Endpoint | None = None
    generation: int = 0
    shared: Any = None

    @property
    def partition(self) -> int:
        """The index of the task's partition."""
        return int(self.context.partitionId())

    @property
    def threads(self) -> int:
        """The number of threads that the task may use."""
        return max(1, int(self.context.cpus()))

    def attempt(self) -> Attempt:
        """Return this call as an attempt at a worker's task."""
        endpoint = self.endpoint or Endpoint("", 0, "", b"")  # none yet: worker 0 may serve it later
        return Attempt(self.partition, self.context.taskAttemptId(), self.threads, self.generation, endpoint)


class Task(ABC, Generic[R_co]):
    """A kind of task, whose results have the type ``R_co``.

    Attributes:
        uses_keras: whether the task needs Keras.
        spread: if Spark gives the tasks no GPUs, whether each task has to use the GPU chosen for it, so that
            tasks are spread over the machine's GPUs; else a reused Python process keeps the GPU that it is
            bound to.
    """

    uses_keras: ClassVar[bool] = True
    spread: ClassVar[bool] = False

    @abstractmethod
    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[R_co]:
        """Yield the task's results, and read all values that Spark gives the task."""

    def worker(self, call: TaskCall) -> int:
        """Return the index of the worker that a call runs."""
        return call.partition


@dataclass(frozen=True)
class FirstRowTask(Task[Sample]):
    """Return the first row that a user's function returns; nothing if it returns no rows.

    Attributes:
        function: the function.
        workers: the number of workers.
        counts: the number of arrays that the model takes for x and for y.
        labels: whether rows must have labels.
    """

    function: RowFunction
    workers: int
    counts: Counts
    labels: bool

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[Sample]:
        """Yield the first row of worker 0."""
        for whole in parts_made(self.function, 0, self.workers, labels=self.labels):
            sample = Sample.of(whole, self.counts)
            arrays = list(map(as_rows, sample.values, sample.names))
            if len(arrays[0]):
                yield sample.first_of(arrays)
                break
        _drain(given)


@dataclass(frozen=True)
class DealTask(Task[tuple[int, Block]]):
    """Deal the rows of an RDD to workers.

    Attributes:
        rows: the rows.
        num_workers: the number of workers.
        seed: the seed of the rows' order; None deals round-robin by index.
    """

    rows: RddRows
    num_workers: int
    seed: int | None

    uses_keras = False

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[tuple[int, Block]]:
        """Yield blocks, each with the index of its worker."""
        try:
            for worker, block in deal(self.rows.blocks(given, call.partition), self.num_workers, self.seed):
                if block.part != EMPTY or self.rows.part == TRAINING:
                    yield worker, block
        except DataError as error:
            if call.endpoint is not None:
                client.report_failure(
                    call.endpoint,
                    kind="data",
                    worker=call.partition,
                    generation=call.generation,
                    attempt=-1,
                    host=socket.gethostname(),
                    message=error.reason,
                    traceback=error.traceback,
                )
            raise


@dataclass(frozen=True)
class FunctionTask(Task[object]):
    """Run a user's function on every worker of a group.

    Attributes:
        function: the function, which is called with the worker's context.
        num_workers: the number of workers.
    """

    function: Callable[[WorkerContext], object]
    num_workers: int

    uses_keras = False
    spread = True

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[object]:
        """Yield the function's result on this worker."""
        _drain(given)
        yield run_task(self.function, call.attempt(), self.num_workers)


@dataclass(frozen=True)
class TrainTask(Task[object]):
    """Train a worker. The shared value is a TrainJob.

    Attributes:
        code: the user's code.
        rows: the rows.
        checked: the parts (TRAINING, VALIDATION) whose rows the driver has checked for values that cannot be
            trained on.
        shuffled: whether a shuffle dealt the training rows to workers.
    """

    code: Code
    rows: TaskRows
    checked: frozenset[int] = frozenset()
    shuffled: bool = False

    spread = True

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[object]:
        """Train; in a hosted run, yield the messages for the client."""
        from sparkdl.worker import train

        job: TrainJob = call.shared.value
        keys, attempt = self.rows.keys(job.settings.plan), call.attempt()
        faults = Faults(job.schema, job.classes, keys.seeds, keys.origin, checked=self.checked)
        blocks = self.rows.blocks(given, attempt.worker, call.endpoint)
        watched = Watched(blocks, faults, shuffled=self.shuffled)
        if job.hosted is None:
            train.train_task(job, attempt, watched, self.code)
        else:
            from sparkdl.worker import hosted_server

            yield from hosted_server.train(job, attempt, watched, self.code, call.context)
        _drain(given)

    def worker(self, call: TaskCall) -> int:
        """Return the index of the worker: an extra task of a hosted run precedes the workers."""
        hosted = call.shared.value.hosted
        return call.partition - (hosted.ahead if hosted is not None else 0)


@dataclass(frozen=True)
class PredictRowsTask(Task[object]):
    """Predict the rows of an RDD. The shared value is an InferenceJob.

    Attributes:
        code: the user's code.
    """

    code: Code

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[object]:
        """Yield the prediction of each row."""
        from sparkdl.worker import inference

        job: InferenceJob = call.shared.value
        model = inference.load_model(job, self.code, call.threads)
        yield from inference.predict_rows(model, job, given, call.partition)


@dataclass(frozen=True)
class PredictBlocksTask(Task[Any]):
    """Predict blocks of rows. The shared value is an InferenceJob.

    Attributes:
        code: the user's code.
        rows: the rows.
    """

    code: Code
    rows: TaskRows

    def run(self, given: Iterator[Any], call: TaskCall) -> Iterator[Any]:
        """Yield the predictions in order, for a part of the rows at a time."""
        from sparkdl.worker import inference

        job: InferenceJob = call.shared.value
        model = inference.load_model(job, self.code, call.threads)
        for block in self.rows.blocks(given, call.partition, call.endpoint):
            yield from inference.predict_block(model, job, block)
        _drain(given)


@dataclass(frozen=True, kw_only=True)
class PredictColumnsTask(Task[object]):
    """Predict from tuples of Arrow arrays. The shared value is an InferenceJob.

    Attributes:
        code: the user's code.
        output: the shape of one row's prediction, or a dict of shapes.
        head: the kind of output.
        decode: functions that convert values of some columns to arrays, by column index.
    """

    code: Code
    output: Shapes
    head: OutputKind
    decode: Mapping[int, Decode] = field(default_factory=dict)

    def run(self, given: Iterator[Any], call: TaskCall) -> Iterator[object]:
        """Yield the predictions for each tuple as one Arrow array."""
        from sparkdl.worker import inference

        job: InferenceJob = call.shared.value
        model = inference.load_model(job, self.code, call.threads)
        for columns in given:
            yield inference.predict_columns(
                model, job, columns, output=self.output, head=self.head, decode=self.decode
            )


@dataclass(frozen=True)
class EvaluateTask(Task[tuple[bytes, int]]):
    """Evaluate the rows of a partition. The shared value is an InferenceJob.

    Attributes:
        code: the user's code.
        rows: the rows.
    """

    code: Code
    rows: TaskRows

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[tuple[bytes, int]]:
        """Yield the metric states and the number of rows; nothing if there are no rows."""
        from sparkdl.worker import inference

        blocks = self.rows.blocks(given, call.partition, call.endpoint)
        yield from inference.evaluate_blocks(call.shared.value, self.code, blocks, call.threads)
        _drain(given)


@dataclass(frozen=True)
class EvaluateFrameTask(Task[object]):
    """Evaluate the rows of a DataFrame's partition.

    Attributes:
        task: the task that evaluates them.
    """

    task: EvaluateTask

    def run(self, given: Iterator[object], call: TaskCall) -> Iterator[object]:
        """Yield the results of the task as Arrow batches."""
        from sparkdl.data import arrow

        for states, count in self.task.run(given, call):
            yield arrow.record({"states": [states], "rows": [count]})


def run(task: Task[R_co], given: Iterator[object], call: TaskCall) -> Iterator[R_co]:
    """Run a task over the values that Spark gives it.

    Raises:
        SparkDLError: the task failed. Any other exception becomes a WorkerError.
    """
    try:
        yield from task.run(computed(given, f"partition {call.partition}"), call)
    except SparkDLError:
        raise
    except Exception as error:
        raise WorkerError.of(reason_of(error), host=socket.gethostname(), worker=task.worker(call)) from error


def _drain(given: Iterator[object]) -> None:
    for _ in given:
        pass


def relay(iterator: Iterator[object], endpoint: Endpoint, path: str, body: bytes) -> Iterator[RecordBatch]:
    """Yield, in pieces, the answer of an endpoint that only executors can reach."""
    from sparkdl.data import arrow

    _drain(iterator)
    connection = client.Connection(endpoint, retries=1)
    try:
        _, answer = connection.post(path, body)
    finally:
        connection.close()
    yield from arrow.rows_of(answer)


def import_keras(*, quietly: bool = False) -> None:
    """Import Keras in about half the usual time, for a task that needs it at once.

    Garbage collection is off during the import, and later skips the imported objects. Optional imports of
    Keras, for plots, data frames, notebooks and scikit-learn's pipelines, are skipped.

    Args:
        quietly: whether to hide the output of the backend's libraries, which the driver prints as well.
    """
    if "keras" in sys.modules:
        return
    # Exceptions that libraries catch during the import stay with their frames. In a thread of its own, those
    # frames do not lead to the frames of the task, which would keep its rows and the token of its run.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_import_frozen, quietly).result()


def _import_frozen(quietly: bool) -> None:
    optional = {"IPython", "matplotlib", "pandas", "sklearn"} - sys.modules.keys()
    collects = gc.isenabled()
    gc.disable()
    sys.modules.update(dict.fromkeys(optional))  # type: ignore[arg-type]  # None: an import of it fails
    try:
        with _errors_kept() if quietly else nullcontext():
            from sparkdl.modeling import serialization  # noqa: F401
    finally:
        for name in optional:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def _errors_kept() -> Iterator[None]:
    """Hold back the process's stderr in a ``with`` block, unless the block fails."""
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
