"""Choice of the source for the user's rows, and checks that two sources can be combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.data.arrays import HOMES, is_array
from sparkdl.data.decoding import Decode
from sparkdl.data.schema import Counts, Sample, Schema, Takes
from sparkdl.errors import ConfigError
from sparkdl.sources.base import ArraySource, RddSource, Source
from sparkdl.sources.dataframe import frame_source
from sparkdl.sources.functions import FunctionSource
from sparkdl.spark.application import SparkApplication
from sparkdl.worker.task_rows import RowFunction


@dataclass(frozen=True)
class SharedArrays:
    """Arrays that several fits train on, with the same validation rows.

    Attributes:
        name: a name that no other arrays of the application have.
        x: the arrays.
    """

    name: str
    x: Any


EVERY = Takes()  # rows with labels, and no strings


def make_source(
    parts: tuple[Any, ...],
    columns: tuple[Any, ...],
    counts: Counts,
    what: str = "x",
    *,
    indicator: str | None = None,
    decode: Mapping[str, Decode] | None = None,
    takes: Takes = EVERY,
) -> Source:
    """Return the source of the user's rows.

    Args:
        parts: x, y and sample weights; all but x may be None or missing. x: arrays or pandas, or a
            structure of them; SharedArrays; an RDD; a DataFrame; or, unless ``counts`` has x alone, a
            function.
        columns: the columns of a DataFrame for x and for y, or for x alone if ``counts`` has x alone: each a
            name, or a list or a dict of names.
        counts: the number of arrays that the model takes for x and for y; to predict, for x alone.
        what: the name of x in error messages.
        indicator: the column of a DataFrame that marks validation rows.
        decode: functions that convert values of a DataFrame's columns to arrays, by column name.
        takes: the rows that the model takes; its ``labels`` is ignored if ``counts`` has x alone.

    Raises:
        ConfigError: the rows are of a kind that is not supported, or another argument does not fit them. The
            message names the remedy.
        DataError: the arrays have different lengths, or one cannot be read as rows.
    """
    x, y, weights = (*parts, None, None)[:3]
    if isinstance(x, SharedArrays):
        source = make_source((x.x, y, weights), columns, counts, what, takes=takes)
        source.shared = x.name
        return source
    frame = isinstance(x, DataFrame) or (
        type(x).__module__.startswith("pyspark.sql") and not isinstance(x, RDD)
    )
    if not frame:
        refuse_columns(validation_indicator_col=indicator, decode=decode)
    if (frame or isinstance(x, RDD)) and y is not None:
        raise ConfigError(
            f"y should be left out if {what} is an RDD or a DataFrame, which contains the labels; got both."
        )
    if frame:
        if len(counts) > 1:
            columns = _label_columns(x, columns, weights, takes.labels)
        names = columns if weights is None else (*columns, weights)
        return frame_source(x, names, counts, indicator, decode, texts=takes.texts)
    if isinstance(x, RDD):
        return _rdd_source(x, weights, counts, what, takes.labels)
    kind = f"{type(x).__module__}.{type(x).__name__}"
    homes = {base.__module__.split(".")[0] for base in type(x).__mro__} if not is_array(x) else set()
    if callable(x) and not homes & HOMES and len(counts) > 1:
        return _function_source(x, {"y": y, "sample_weight": weights}, counts, what, takes.labels)
    with_y = "NumPy arrays or pandas with y, an RDD of (x, y)"
    alone = "NumPy arrays or pandas, an RDD of x or of (x, y)"
    expected = f"{what} should be {with_y if len(counts) > 1 else alone}, or a DataFrame"
    if homes & HOMES or hasattr(x, "__next__") or callable(x):
        raise ConfigError(
            f"{expected}; got a {kind}. tf.data datasets, generators and torch loaders cannot be sent to "
            "other processes. Pass arrays; or, for fit and evaluate, a function (worker, num_workers) "
            "that creates them on a worker."
        )
    if x is None or isinstance(x, str):
        raise ConfigError(f"{expected}; got {kind}.")
    arrays = tuple(map(_alone, (x, y, weights), (*counts, counts[-1], counts[-1])[:3]))
    return _array_source(arrays, counts, what, kind, takes.labels)


def _alone(value: Any, count: int | None) -> Any:
    """Return the array of a one-element list for a model that takes one array; Keras accepts such a list."""
    if count == 1 and isinstance(value, list | tuple) and len(value) == 1 and is_array(value[0]):
        return value[0]
    return value


def refuse_columns(**arguments: object) -> None:
    """Refuse arguments about columns for rows that are not a DataFrame.

    Raises:
        ConfigError: an argument is given. The message names the first one.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"{name} needs rows in a DataFrame; got rows of a different kind. Leave {name} out."
            )


def _label_columns(
    frame: DataFrame, columns: tuple[Any, ...], weights: object, labels: bool
) -> tuple[Any, ...]:
    """Return the columns of x and of y, or of x alone if rows have no labels and need none.

    Raises:
        ConfigError: no label column is named, and the model needs labels, or there are sample weights.
    """
    x, y = columns
    if not labels and y == LABEL and LABEL not in {name.lower() for name in frame.columns}:
        y = None  # only the default, and the DataFrame has no such column
    if y:
        return columns
    if labels:
        raise ConfigError(f"label_col should be the name of the column of labels, {NEEDED}; got {y!r}.")
    _refuse_weights(weights)
    return (x,)


LABEL = "label"  # the default label column
NEEDED = "since the loss or the metrics of the compiled model need labels"


def _refuse_weights(weights: object) -> None:
    if weights is not None:
        raise ConfigError(
            "sample_weight needs rows with labels, since Keras ignores it without labels; got no labels. "
            "Leave sample_weight out."
        )


def _array_source(parts: tuple[Any, ...], counts: Counts, what: str, kind: str, labels: bool) -> ArraySource:
    x, y, weights = parts
    if len(counts) == 1:
        return ArraySource(Sample.of((x,), counts, (what,)))
    if y is None:
        if labels:
            raise ConfigError(f"y should be passed with {what}={kind}, {NEEDED}; got None.")
        _refuse_weights(weights)
        return ArraySource(Sample.of((x,), counts))
    given = (x, y) if weights is None else (x, y, weights)
    return ArraySource(Sample.of(given, counts))


def _rdd_source(rdd: RDD[Any], weights: object, counts: Counts, what: str, labels: bool) -> RddSource:
    if weights is not None:
        raise ConfigError(
            f"sample_weight should be left out if {what} is an RDD; got both. Use rows (x, y, "
            "sample_weight) instead."
        )
    return RddSource(rdd, counts, labels=labels)


def _function_source(
    function: RowFunction, others: dict[str, object], counts: Counts, what: str, labels: bool
) -> FunctionSource:
    given = [name for name, other in others.items() if other is not None]
    if given:
        names = " and ".join(given)
        raise ConfigError(
            f"{names} should be left out if {what} is a function; got both. Return {names} from the function."
        )
    return FunctionSource(function, counts, labels=labels)


def require_sendable(source: Source, cluster: SparkApplication) -> None:
    """Require rows that can be sent to executors.

    Raises:
        ConfigError: the rows are not a DataFrame and would travel as an RDD, which Spark Connect lacks.
    """
    if cluster.remote and not source.over_connect:
        raise ConfigError(
            f"Over Spark Connect, rows should be a DataFrame; got {source.kind}. Create one from pandas "
            "or lists with spark.createDataFrame, or use a classic SparkSession, without remote()."
        )


def require_partner(source: Source, held: Source) -> None:
    """Require validation rows that can be dealt together with the training rows.

    Raises:
        ConfigError: the rows cannot be dealt together. The message names the expected kind.
    """
    if source.partners != held.partners:
        raise ConfigError(
            f"validation_data should be {source.partners} if the training rows are {source.kind}; got "
            f"{held.kind}."
        )


def whole_partitions(source: Source, wanted: int | None, num_workers: int) -> int:
    """Give each worker whole partitions; return the number of workers, at most one per partition.

    Args:
        source: the training rows.
        wanted: the number of workers that the user requested, if any.
        num_workers: the number of workers that is possible.

    Raises:
        ConfigError: the user requested more workers than there are partitions.
    """
    source.partitions = count = source.num_partitions() or 1
    if wanted is not None and wanted > count:
        raise ConfigError(
            f"preserve_partitions=True needs at least one partition per worker; got num_workers={wanted} "
            f"and {count} partition{'s' * (count != 1)}. Use num_workers={count} or less, or create more "
            f'partitions first, for example with df.repartition({wanted}, "group").'
        )
    return min(num_workers, count)


def require_partitions(source: Source, held: Source | None) -> None:
    """Require rows whose partitions can be preserved.

    Raises:
        ConfigError: the rows have no partitions, or ``validation_data`` would have to be dealt to workers.
    """
    if not source.of_a_plan:
        raise ConfigError(
            f"preserve_partitions needs an RDD or a DataFrame; got {source.kind}. Leave "
            "preserve_partitions out."
        )
    if held is not None:
        raise ConfigError(
            "validation_data needs a shuffle to deal its rows to the workers, but preserve_partitions=True "
            "shuffles nothing. Use validation_split, or validation_indicator_col with a DataFrame, instead."
        )


def share_weights(source: Source, held: Source | None) -> Schema:
    """Return the schema of a run's rows, with weights if the training or the validation rows have them.

    Also set the schema of the validation rows: x and y as in the training rows, and their own weights and
    integer dtypes.
    """
    schema = source.schema
    if held is None:
        return schema
    held.schema = schema.held(held.schema)
    return schema.with_held(held.schema)
