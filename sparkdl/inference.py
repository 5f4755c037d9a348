"""Predict and evaluate on executors: one model load per Python worker, predictions beside their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparkdl import feed, frames, models
from sparkdl.backends import prepare_backend
from sparkdl.feed import Column
from sparkdl.tasks import blocks_of
from sparkdl.weights import Array
from sparkdl.worker import evaluate, take_replica


@dataclass(frozen=True)
class InferenceJob:
    """What the tasks of a predict or an evaluate share: values only, so that it can be broadcast.

    Attributes:
        spec: the model.
        batch_size: rows per forward pass.
        columns: what every row has to be.
    """

    spec: models.ModelSpec
    batch_size: int
    columns: tuple[Column, ...]


class Inputs(NamedTuple):
    """The rows of a task.

    Attributes:
        rows: the task's iterator.
        partition: the index of the partition.
        threads: how many threads the task may use.
        options: "encoding" of the rows, and what the stage takes besides.
    """

    rows: Iterable[Any]
    partition: int
    threads: int
    options: dict[str, Any]


def predict_stage(
    inputs: Inputs, job: InferenceJob, objects: models.Objects, builder: Callable[[], Any] | None
) -> Iterator[Any]:
    """Yield a prediction per row of an RDD, or each Arrow batch with a column more."""
    prepare_backend(inputs.threads)
    model = take_replica(job.spec, objects, builder, joint=False).model
    if inputs.options["encoding"] == "arrow":
        for batch in inputs.rows:
            yield _predict_arrow(model, batch, job, inputs.options)
    elif inputs.options["encoding"] == "dealt":
        for _, block in inputs.rows:
            yield from _predict(model, block.columns[0], job.batch_size)
    else:
        yield from _predict_rows(model, inputs, job)


def _predict_rows(model: Any, inputs: Inputs, job: InferenceJob) -> Iterator[Array]:
    place, size, first = f"partition {inputs.partition}", feed.rows_per_block(job.columns), 0
    chunk: list[Any] = []
    for row in inputs.rows:
        chunk.append(row[0] if isinstance(row, tuple) else row)
        if len(chunk) == size:
            yield from _predict(model, job.columns[0].of(chunk, place, first), job.batch_size)
            first, chunk = first + len(chunk), []
    if chunk:
        yield from _predict(model, job.columns[0].of(chunk, place, first), job.batch_size)


def _predict_arrow(model: Any, batch: Any, job: InferenceJob, options: dict[str, Any]) -> Any:
    # The features came along as a last column of their own, already as numbers.
    features = frames.column_array(
        batch.column(batch.num_columns - 1), job.columns[0], "row {} of a batch".format
    )
    rest = batch.select(range(batch.num_columns - 1))
    if batch.num_rows:
        predictions = _predict(model, features, job.batch_size)
    else:
        predictions = np.empty((0, *options["output"]), np.float32)
    if predictions.ndim == 2 and predictions.shape[1] == 1:
        predictions = predictions[:, 0]
    return frames.append_column(
        rest, options["output_col"], frames.prediction_array(predictions.astype(np.float32, copy=False))
    )


def _predict(model: Any, x: Array, batch_size: int) -> Array:
    parts = [model.predict_on_batch(x[start : start + batch_size]) for start in range(0, len(x), batch_size)]
    return np.concatenate(parts)


def evaluate_stage(
    inputs: Inputs, job: InferenceJob, objects: models.Objects, builder: Callable[[], Any] | None
) -> Iterator[Any]:
    """Yield the metric states over a partition's rows, and their number."""
    spool = feed.Spool(job.columns, feed.local_directory())
    spool.extend(blocks_of(inputs.rows, inputs.options["encoding"], inputs.partition, inputs.options))
    rows = spool.rows(feed.TRAINING)
    if not rows.count:
        return
    prepare_backend(inputs.threads)
    replica = take_replica(job.spec, objects, builder, joint=False)
    evaluate(replica, rows, job.batch_size)
    variables = models.metric_variables(replica.model)
    states = models.layout_of(variables).to_bytes(models.read(variables))
    if inputs.options["encoding"] == "arrow":
        yield frames.record({"states": [states], "rows": [rows.count]})
    else:
        yield states, rows.count
