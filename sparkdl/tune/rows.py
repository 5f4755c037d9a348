"""Samples and folds of the rows that fits side by side are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple, cast

import numpy as np
from pyspark import RDD

from sparkdl.data.arrays import array_of, as_rows, is_array, is_sparse_matrix
from sparkdl.data.sparse import SparseRows
from sparkdl.errors import ConfigError


class TrainingRows(NamedTuple):
    """Rows for training, as arguments of ``SparkModel.fit``."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    def as_data(self) -> Any:
        """Return the rows as ``validation_data``."""
        given = self if self.sample_weight is not None else self[:2]
        return self.x if self.y is None else tuple(given)


def resampled(rows: TrainingRows, seed: int) -> TrainingRows:
    """Return a bootstrap sample of rows: as many, drawn with replacement.

    Of an RDD or a DataFrame Spark draws each row a number of times that has the Poisson distribution with
    mean 1, so the number of rows is only about the same.
    """
    if _is_distributed(rows.x):
        return rows._replace(x=rows.x.sample(True, 1.0, seed))
    count = _length(rows.x)
    places = np.random.default_rng(seed).integers(count, size=count)
    return TrainingRows(*(_taken(part, places) for part in rows))


def folds_of(rows: TrainingRows, count: int, seed: int) -> Iterator[tuple[TrainingRows, TrainingRows]]:
    """Yield, for each of several folds of about equal size, the rows outside of the fold and those in it.

    The rows are divided at random. Each fold of an RDD or a DataFrame is computed anew, unless it is cached.

    Args:
        rows: the rows.
        count: the number of folds.
        seed: the seed of the division.
    """
    if _is_distributed(rows.x):
        parts = rows.x.randomSplit([1.0] * count, seed)
        for place, held in enumerate(parts):
            rest = [part for number, part in enumerate(parts) if number != place]
            yield rows._replace(x=reduce(lambda one, other: one.union(other), rest)), rows._replace(x=held)
        return
    order = np.random.default_rng(seed).permutation(_length(rows.x))
    places = np.array_split(order, count)
    for place, held in enumerate(places):
        outside = np.concatenate([part for number, part in enumerate(places) if number != place])
        chosen = np.sort(outside), np.sort(held)
        training, validation = (TrainingRows(*(_taken(part, which) for part in rows)) for which in chosen)
        yield training, validation


def require_samples(rows: TrainingRows, what: str) -> None:
    """Require rows that can be drawn one by one.

    Args:
        rows: the rows.
        what: what needs them, in the message.

    Raises:
        ConfigError: the rows are of another kind.
    """
    if callable(rows.x) and not is_array(rows.x):
        raise ConfigError(f"{what} needs arrays, an RDD or a DataFrame; got a function. Pass rows instead.")


def count_of(rows: TrainingRows) -> int | None:
    """Return the number of rows; None for an RDD or a DataFrame."""
    return None if _is_distributed(rows.x) else _length(rows.x)


def _is_distributed(x: Any) -> bool:
    return isinstance(x, RDD) or hasattr(x, "sparkSession")


def _length(x: Any) -> int:
    """Return the number of rows of the first array of a structure of arrays."""
    while isinstance(x, dict | tuple) or (isinstance(x, list) and x and is_array(x[0])):
        x = next(iter(x.values() if isinstance(x, dict) else x))
    return int(x.shape[0]) if is_sparse_matrix(x) else len(x)


def _taken(part: Any, places: Any) -> Any:
    """Return the rows at some places of an array, or of each array in a structure."""
    if part is None:
        return None
    if isinstance(part, dict):
        return {name: _taken(each, places) for name, each in part.items()}
    if isinstance(part, tuple) or (isinstance(part, list) and part and is_array(part[0])):
        return type(part)(_taken(each, places) for each in part)
    if is_sparse_matrix(part):
        return _taken_of_sparse(part, places)
    return part.iloc[places] if hasattr(part, "iloc") else array_of(part)[places]


def _taken_of_sparse(matrix: Any, places: Any) -> Any:
    """Return the rows at some places of a matrix of scipy.sparse, or of a tf.SparseTensor."""
    if hasattr(matrix, "tocsr"):
        return matrix.tocsr()[places]
    rows = cast(SparseRows, as_rows(matrix, "x"))[places].compact()
    of_rows = np.repeat(np.arange(len(rows)), rows.spans[:, 1])
    indices = np.column_stack([of_rows, rows.entries["index"].astype(np.int64)])
    return type(matrix)(indices, rows.entries["value"], rows.shape)
