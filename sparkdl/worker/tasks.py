"""The stages of a job, which run in a Spark task after its preflight.

Each stage takes the task's iterator and always drains it: Spark ends a Python worker that leaves rows unread,
and every compiled function is lost with it.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from sparkdl.data.arrays import as_rows
from sparkdl.data.bad_values import Faults, Watched
from sparkdl.data.blocks import (
    EMPTY,
    TRAINING,
    VALIDATION,
    Block,
    blocks_of_parts,
    blocks_of_rows,
    deal,
    hold_out,
    parts_of,
)
from sparkdl.data.schema import Sample, Schema
from sparkdl.errors import DataError, SparkDLError, WorkerError
from sparkdl.process.reasons import own_lines, reason_of, text_of
from sparkdl.transport import client
from sparkdl.transport.exchange import Endpoint
from sparkdl.worker.collective import run_task
from sparkdl.worker.session import Attempt


class Call(NamedTuple):
    """The arguments of a stage.

    Attributes:
        stage: "look", "deal", "train", "run", "predict" or "evaluate".
        endpoint: the fields of the run's endpoint, if there is one.
        generation: the number of the worker group's start to which the task belongs.
        shared: holds the values that all tasks share, as ``value``: a broadcast variable, or a file.
        objects: the custom objects of the model.
        builder: the function that builds the model, if there is one.
        options: the other options of the stage.
    """

    stage: str
    endpoint: tuple[Any, ...] | None
    generation: int
    shared: Any
    objects: dict[str, Any] | None
    builder: Callable[[], Any] | None
    options: dict[str, Any]


def import_keras(*, quietly: bool = False) -> None:
    """Import Keras in about half the usual time, for a task that needs it at once.

    Garbage collection is off during the import, and later skips the imported objects. Optional imports of
    Keras, for plots, data frames, notebooks and scikit-learn's pipelines, are skipped.

    Args:
        quietly: whether to hold back the output of the backend's libraries. The driver prints the same.
    """
    if "keras" in sys.modules:
        return
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


def run(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    """Run a stage over the rows of a task. ``context`` is its TaskContext."""
    stages = {
        "look": _look,
        "deal": _deal,
        "train": _train,
        "run": _run,
        "predict": _predict,
        "evaluate": _evaluate,
    }
    worker, host = context.partitionId(), socket.gethostname()
    try:
        yield from stages[call.stage](computed(iterator, f"partition {worker}"), context, call)
    except SparkDLError:
        raise
    except Exception as error:
        raise WorkerError.of(reason_of(error), host=host, worker=worker) from error


def computed(rows: Iterable[Any], place: str) -> Iterator[Any]:
    """Yield rows; turn an exception of the user's function that computes them into a DataError.

    Args:
        rows: the rows.
        place: the place of the rows, for the error.

    Raises:
        DataError: the function raised an exception.
    """
    try:
        yield from rows
    except SparkDLError:
        raise
    except Exception as error:
        if not own_lines(text_of(error), others=False):
            raise  # an error of Spark, which the job reports
        reason = f"The rows of {place} could not be computed: {reason_of(error)}"
        raise DataError(reason, traceback=text_of(error)) from error


def blocks_of(
    iterator: Iterable[Any], encoding: str, partition: int, options: dict[str, Any]
) -> Iterator[Block]:
    """Return the blocks of a task's rows.

    Args:
        iterator: tuples of an RDD ("rows"), dealt blocks ("dealt") or Arrow batches ("arrow"). It is ignored
            if a user's function returns the rows ("function").
        encoding: the kind of the rows, one of these names.
        partition: the index of the partition.
        options: "schema", and the other options of the encoding.
    """
    if encoding == "dealt":
        return (block for _, block in iterator)
    schema = options["schema"]
    if encoding == "arrow":
        from sparkdl.data import arrow

        return arrow.blocks_of_batches(iterator, schema.columns, options["seed"], options.get("decode"))
    if encoding == "function":
        blocks = _blocks_of_function(partition, options)
    else:
        place = options.get("place", "partition")
        blocks = blocks_of_rows(iterator, schema, partition, options.get("part", TRAINING), place=place)
    if options.get("split"):
        blocks = hold_out(blocks, options["split"], options["split_seed"])
    return blocks


def _blocks_of_function(partition: int, options: dict[str, Any]) -> Iterator[Block]:
    schema: Schema = options["schema"]
    yield from blocks_of_parts(_made(options["function"], partition, options, schema), schema, partition)
    if options.get("held") is not None:
        held, schema = options["held"]
        parts = _made(held, partition, options, schema)
        yield from blocks_of_parts(parts, schema, partition, VALIDATION)


def _made(function: Any, worker: int, options: dict[str, Any], schema: Schema) -> Iterator[Any]:
    """Yield the parts of the rows that a user's function returns."""

    def parts() -> Iterator[Any]:
        yield from parts_of(function(worker, options["workers"]), labels=schema.labelled)

    return computed(parts(), f"worker {worker}")


def _look(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    """Yield the first row that a user's function returns; nothing if it returns no rows."""
    options = call.options

    def parts() -> Iterator[Any]:
        yield from parts_of(options["function"](0, options["workers"]), labels=options["labels"])

    for whole in computed(parts(), "worker 0"):
        sample = Sample.of(whole, options["counts"])
        arrays = list(map(as_rows, sample.values, sample.names))
        if len(arrays[0]):
            yield sample.first_of(arrays)
            break
    for _ in iterator:
        pass


def _deal(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[tuple[int, Block]]:
    options, partition = call.options, context.partitionId()
    try:
        blocks = blocks_of(iterator, "rows", partition, options)
        for worker, block in deal(blocks, options["num_workers"], options["seed"]):
            if block.part != EMPTY or options.get("part", TRAINING) == TRAINING:
                yield worker, block
    except DataError as error:
        if call.endpoint is not None:
            client.report_failure(
                Endpoint(*call.endpoint),
                kind="data",
                worker=partition,
                generation=call.generation,
                attempt=-1,
                host=socket.gethostname(),
                message=error.reason,
                traceback=error.traceback,
            )
        raise


def _task(context: Any, call: Call) -> Attempt:
    endpoint = Endpoint(*(call.endpoint or ("", 0, "", b"")))  # none yet: worker 0 may serve it later
    threads = max(1, context.cpus())
    return Attempt(context.partitionId(), context.taskAttemptId(), threads, call.generation, endpoint)


def _run(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    for _ in iterator:
        pass
    yield run_task(call.options["function"], _task(context, call), call.options["workers"])


def _train(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    from sparkdl.worker import train

    job, task = call.shared.value, _task(context, call)
    blocks = blocks_of(iterator, call.options["encoding"], task.worker, call.options)
    faults = None if call.options.get("checked") else _faults(job, call.options)
    watched = Watched(blocks, faults, shuffled=call.options.get("shuffled", False))
    own = [call.options.get(name) for name in ("distribution", "rule")]
    code = train.Code(call.objects or {}, call.builder, *own)
    if job.hosted is None:
        train.train_task(job, task, watched, code)
    else:
        from sparkdl.worker import hosted_server

        yield from hosted_server.train(job, task, watched, code, context)
    for _ in iterator:
        pass


def _faults(job: Any, options: dict[str, Any]) -> Faults:
    """Return the counter of faulty rows, which names a row by the partition that it comes from."""
    encoding, plan = options["encoding"], job.settings.plan
    bits = 33 if encoding == "arrow" else 40  # as in Spark's monotonically increasing ids, and in data.blocks
    place = "worker" if encoding == "function" else options.get("place", "partition")
    seed = options["seed"] if encoding == "arrow" else None
    if encoding == "dealt" and plan.shuffle:
        seed = plan.seed
    shuffled = encoding == "arrow" or options.get("split")  # whether keys of validation rows are scrambled

    def origin(key: int) -> str:
        return f"row {key & (1 << bits) - 1} of {place} {key >> bits}"

    return Faults(job.schema, job.classes, (seed, seed if shuffled else None), origin)


def relay(iterator: Iterator[Any], endpoint: Endpoint, path: str, body: bytes) -> Iterator[Any]:
    """Yield, in pieces, the answer of an endpoint that only executors can reach."""
    from sparkdl.data import arrow

    for _ in iterator:
        pass
    connection = client.Connection(endpoint, retries=1)
    try:
        _, answer = connection.post(path, body)
    finally:
        connection.close()
    yield from arrow.rows_of(answer)


def _predict(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    from sparkdl.worker import inference

    inputs = inference.Inputs(iterator, context.partitionId(), max(1, context.cpus()), call.options)
    return inference.predict_stage(inputs, call.shared.value, call.objects or {}, call.builder)


def _evaluate(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    from sparkdl.worker import inference

    inputs = inference.Inputs(iterator, context.partitionId(), max(1, context.cpus()), call.options)
    yield from inference.evaluate_stage(inputs, call.shared.value, call.objects or {}, call.builder)
    for _ in iterator:
        pass
