"""The stages of a job, as they run in a Spark task once its preflight is over.

Each takes the task's iterator and always drains it: Spark ends a Python worker that leaves rows unread,
and with it every compiled function.
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
from sparkdl.worker.session import Task


class Call(NamedTuple):
    """What a stage is called with.

    Attributes:
        stage: "look", "deal", "train", "run", "predict" or "evaluate".
        endpoint: the parts of the run's endpoint, where there is one.
        generation: which start of the gang the task belongs to.
        shared: what all tasks have in common, as ``value``: a broadcast variable, or a file.
        objects: the custom objects of the model.
        builder: the function that builds the model, where there is one.
        options: what else the stage takes.
    """

    stage: str
    endpoint: tuple[Any, ...] | None
    generation: int
    shared: Any
    objects: dict[str, Any] | None
    builder: Callable[[], Any] | None
    options: dict[str, Any]


def import_keras(*, quietly: bool = False) -> None:
    """Import Keras in a process that has to work soon, which takes half the time that it takes elsewhere.

    Args:
        quietly: whether to keep back what the backend's libraries print: they print the same on the driver.

    No garbage is collected meanwhile, and none later among what was imported. What Keras takes where it is
    there, for plots, data frames, notebooks and scikit-learn's pipelines, is not taken.
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
    """Keep back what is written to the process's stderr in a ``with`` block that does not fail."""
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
    """Run a stage over the rows of a task, whose TaskContext is ``context``."""
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
    """Yield rows; what the user's own function raises that computes them is an error of the rows.

    Args:
        rows: the rows.
        place: where they are, for the error.

    Raises:
        DataError: the function raised something.
    """
    try:
        yield from rows
    except SparkDLError:
        raise
    except Exception as error:
        if not own_lines(text_of(error), others=False):
            raise  # Spark's own: the job says why
        reason = f"The rows of {place} could not be computed: {reason_of(error)}"
        raise DataError(reason, traceback=text_of(error)) from error


def blocks_of(
    iterator: Iterable[Any], encoding: str, partition: int, options: dict[str, Any]
) -> Iterator[Block]:
    """Return the blocks of a task's rows.

    Args:
        iterator: tuples of an RDD ("rows"), dealt blocks ("dealt"), Arrow batches ("arrow"), or nothing of
            interest, where a function of the user's own has the rows ("function").
        encoding: which of these they are.
        partition: the index of the partition.
        options: "schema", and what the encoding takes besides.
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
    """Yield the parts of what a user's function returns."""

    def parts() -> Iterator[Any]:
        yield from parts_of(function(worker, options["workers"]), labels=schema.labelled)

    return computed(parts(), f"worker {worker}")


def _look(iterator: Iterator[Any], context: Any, call: Call) -> Iterator[Any]:
    """Yield the first row of what a user's function returns; no row, if it has none."""
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


def _task(context: Any, call: Call) -> Task:
    endpoint = Endpoint(*(call.endpoint or ("", 0, "", b"")))  # of worker 0 it will be, or of nobody
    threads = max(1, context.cpus())
    return Task(context.partitionId(), context.taskAttemptId(), threads, call.generation, endpoint)


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
    """Return what counts faulty rows, and names them by the partitions that they come from."""
    encoding, plan = options["encoding"], job.settings.plan
    bits = 33 if encoding == "arrow" else 40  # as Spark's monotonically increasing ids have it, and feed
    place = "worker" if encoding == "function" else options.get("place", "partition")
    seed = options["seed"] if encoding == "arrow" else None
    if encoding == "dealt" and plan.shuffle:
        seed = plan.seed
    shuffled = encoding == "arrow" or options.get("split")  # whether validation rows are too

    def origin(key: int) -> str:
        return f"row {key & (1 << bits) - 1} of {place} {key >> bits}"

    return Faults(job.schema, job.classes, (seed, seed if shuffled else None), origin)


def relay(iterator: Iterator[Any], endpoint: Endpoint, path: str, body: bytes) -> Iterator[Any]:
    """Yield, in pieces, what an endpoint answers that only executors reach."""
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
