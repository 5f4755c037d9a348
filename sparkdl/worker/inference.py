"""Prediction and evaluation on executors.

Each Python worker process keeps the model for later tasks. Predictions are yielded in the order of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkdl.core.tree import is_structure, leaves
from sparkdl.core.vectors import LARGE, Array
from sparkdl.data import arrow, blocks, spill
from sparkdl.data.arrays import AnyRows
from sparkdl.data.decoding import Decode
from sparkdl.data.schema import Schema, as_pair
from sparkdl.modeling.backends.choice import prepare_backend
from sparkdl.modeling.classification import OutputKind, Shapes, classify
from sparkdl.modeling.execution import concatenate, predict, rows_of
from sparkdl.modeling.keras_types import Model
from sparkdl.modeling.keras_variables import layout_of, metric_variables, read
from sparkdl.modeling.serialization import ModelSpec
from sparkdl.worker.loop import evaluate
from sparkdl.worker.model_cache import take_model, take_replica
from sparkdl.worker.user_code import Code


@dataclass(frozen=True)
class InferenceJob:
    """Values shared by the tasks of one prediction or evaluation. They can be broadcast.

    Attributes:
        spec: the model.
        batch_size: rows per forward pass.
        schema: the schema that every row has to match.
    """

    spec: ModelSpec
    batch_size: int
    schema: Schema


def load_model(job: InferenceJob, code: Code, threads: int) -> Model:
    """Return the model of a job, in a process that may use this number of threads."""
    prepare_backend(threads)
    return take_model(job.spec, code.objects, code.builder)


def _predict(model: Model, job: InferenceJob, columns: Sequence[AnyRows]) -> Any:
    return predict(model, job.schema.batch(columns).x, job.batch_size)


def predict_block(model: Model, job: InferenceJob, block: blocks.Block) -> Iterator[Any]:
    """Yield the predictions of a block, a limited number of rows at a time."""
    size = _rows_at_once(job)
    for start in range(0, len(block.keys), size):
        yield _predict(model, job, blocks.select(block, slice(start, start + size)).columns)


def predict_rows(model: Model, job: InferenceJob, given: Iterable[object], partition: int) -> Iterator[Any]:
    """Yield the prediction of each row of an RDD's partition."""
    template = job.schema.template[0]
    parts = len(template) if isinstance(template, tuple) else 1
    rows: Iterator[tuple[object]] = ((features_of(row, parts),) for row in given)
    if isinstance(template, int):
        rows = ((_expanded(value, job.schema.columns[template].shape),) for (value,) in rows)
    for block in blocks.blocks_of_rows(rows, job.schema, partition):
        yield from rows_of(_predict(model, job, block.columns))


def _expanded(value: object, shape: tuple[int, ...]) -> object:
    """Return a value with a last dimension of 1 added or removed, if the model's input requires that."""
    if not isinstance(value, np.ndarray | np.generic | int | float):
        return value
    given = np.shape(value)
    return np.reshape(value, shape) if (*given, 1) == shape or given == (*shape, 1) else value


def features_of(row: Any, parts: int | None) -> Any:
    """Return x of a row. A row is x alone, (x, y), (x, y, sample_weight) or a LabeledPoint.

    Args:
        row: the row.
        parts: number of arrays in x; None if it is not known.
    """
    row = as_pair(row)
    if not isinstance(row, tuple) or not row:
        return row
    alone = parts is not None and parts == len(row) > 1 and not is_structure(row[0], parts)
    return row if alone else row[0]


def predict_columns(
    model: Model,
    job: InferenceJob,
    columns: Sequence[arrow.ArrowArray],
    *,
    output: Shapes,
    head: OutputKind,
    decode: Mapping[int, Decode],
) -> arrow.ArrowArray:
    """Return the predictions for Arrow arrays as one Arrow array; see ``PredictColumnsTask``."""
    shapes = list(output.values()) if isinstance(output, dict) else [output]
    if len(columns[0]):
        parts = _arrays_of(columns, job, decode)
        found = concatenate([_predict(model, job, arrays) for arrays in parts])
        predictions = [found[name] for name in output] if isinstance(found, dict) else leaves(found)
    else:
        predictions = [np.empty((0, *shape), np.float32) for shape in shapes]
    if head.classifies:
        classes = classify(predictions[0], logits=head.logits, thresholds=head.thresholds)
        return arrow.struct_array(list(classes._fields), list(map(arrow.prediction_array, classes)))
    values = [_arrow(each, shape) for each, shape in zip(predictions, shapes, strict=True)]
    return arrow.struct_array(list(output), values) if isinstance(output, dict) else values[0]


def _arrays_of(
    columns: Sequence[arrow.ArrowArray], job: InferenceJob, decode: Mapping[int, Decode]
) -> Iterator[list[AnyRows]]:
    """Yield the arrays of a batch, a limited number of rows at a time, because decoding may enlarge rows."""
    count, wanted = len(columns[0]), job.schema.columns
    # For a SQL function, only the arguments show how many columns are joined into its single input.
    if len(wanted) == 1 and len(columns) > 1:
        wanted = (replace(wanted[0], parts=len(columns)),)
    size = blocks.rows_per_block(job.schema.columns) if decode else _rows_at_once(job)
    for start in range(0, count, size):
        name_row = functools.partial(_name_row, start)
        own = arrow.grouped([values.slice(start, size) for values in columns], wanted)
        yield [
            arrow.column_array(values, column, name_row, decode.get(place))
            for place, (values, column) in enumerate(zip(own, wanted, strict=True))
        ]


def _rows_at_once(job: InferenceJob) -> int:
    """Return the number of rows that fill at most LARGE bytes when dense, in whole batches if possible."""
    row = sum(column.whole_nbytes for column in job.schema.columns)
    rows = max(1, LARGE // max(1, row))
    return rows - rows % job.batch_size if rows > job.batch_size else rows


def _name_row(start: int, row: int) -> str:
    return f"row {start + row} of a batch"


def _arrow(predictions: Array, shape: tuple[int, ...]) -> arrow.ArrowArray:
    flat = predictions[:, 0] if shape == (1,) else predictions
    return arrow.prediction_array(flat.astype(np.float32, copy=False))


def evaluate_blocks(
    job: InferenceJob, code: Code, given: Iterable[blocks.Block], threads: int
) -> Iterator[tuple[bytes, int]]:
    """Yield the metric states over the rows of a task, and the number of rows; nothing if it has no rows."""
    spill_file = spill.SpillFile(job.schema, spill.local_directory())
    spill_file.extend(given)
    rows = spill_file.rows(blocks.TRAINING)
    if not rows.count:
        return
    prepare_backend(threads)
    replica = take_replica(job.spec, code.objects, code.builder, joint=False)
    evaluate(replica, rows, job.batch_size)
    variables = metric_variables(replica.model)
    yield layout_of(variables).to_bytes(read(variables)), rows.count
