"""Support for MLlib's LabeledPoint, Vector and Matrix, and conversions from and to NumPy arrays."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pyspark import RDD, SparkContext
from pyspark.ml.functions import array_to_vector
from pyspark.mllib.linalg import DenseMatrix, DenseVector, Matrix, Vector, Vectors
from pyspark.mllib.regression import LabeledPoint
from pyspark.sql import DataFrame, SparkSession

from sparkdl.api.spark_model import SparkModel
from sparkdl.core.vectors import Array
from sparkdl.errors import ConfigError, DataError
from sparkdl.modeling import execution
from sparkdl.sources.columns import resolve

NO_CLASS = (
    "Expected labels to be class indices below {classes}; got {label}. Correct the labels, or pass a larger "
    "nb_classes."
)


class SparkMLlibModel(SparkModel):
    """A SparkModel that trains on LabeledPoints and predicts from vectors and matrices.

    It takes the arguments of SparkModel.

    Example:
        >>> SparkMLlibModel(model).fit(to_labeled_point(sc, x, y), epochs=10)  # doctest: +SKIP
    """

    def fit(
        self,
        x: Any = None,
        *arguments: Any,
        categorical: bool = False,
        nb_classes: int | None = None,
        **more: Any,
    ) -> Any:
        """Train the model in place, as ``SparkModel.fit`` does.

        Args:
            x: an RDD of LabeledPoint, or any rows that ``SparkModel.fit`` takes.
            arguments: as in ``SparkModel.fit``.
            categorical: whether to convert labels, which are class indices, to one-hot vectors. This
                includes ``validation_data`` if it is an RDD.
            nb_classes: number of classes; by default the width of the model's output.
            more: as in ``SparkModel.fit``.

        Raises:
            ConfigError: ``categorical`` is given for rows that are not an RDD, or the number of classes is
                not known.
        """
        if not categorical:
            return super().fit(x, *arguments, **more)
        given = inspect.signature(super().fit).bind(self._one_hot(x, nb_classes), *arguments, **more)
        if isinstance(held := given.arguments.get("validation_data"), RDD):
            given.arguments["validation_data"] = self._one_hot(held, nb_classes)
        return super().fit(*given.args, **given.kwargs)

    def evaluate(
        self,
        x: Any = None,
        *arguments: Any,
        categorical: bool = False,
        nb_classes: int | None = None,
        **more: Any,
    ) -> Any:
        """Return the loss and the metrics, as ``SparkModel.evaluate`` does, for rows that ``fit`` takes.

        ``categorical`` and ``nb_classes`` are as in ``fit``.

        Raises:
            ConfigError: as in ``fit``.
        """
        if categorical:
            x = self._one_hot(x, nb_classes)
        return super().evaluate(x, *arguments, **more)

    def _one_hot(self, rows: Any, classes: int | None) -> RDD[tuple[Array, Array]]:
        if not isinstance(rows, RDD):
            raise ConfigError(
                f"x should be an RDD of LabeledPoint with categorical=True; got {type(rows).__name__}. "
                "Leave categorical out for other rows."
            )
        return _one_hot(rows, classes or self._width())

    def _width(self) -> int:
        shape = getattr(self.model, "output_shape", None)
        if not isinstance(shape, tuple) or len(shape) != 2 or not shape[1]:
            raise ConfigError(
                f'The number of classes is unknown, because the model "{self.model.name}" has no output of '
                "shape (classes,). Pass nb_classes."
            )
        return int(shape[1])

    def predict(self, x: Any, *arguments: Any, **more: Any) -> Any:
        """Return the model's predictions.

        Args:
            x: one row as a Vector, several rows as a Matrix, or any rows that ``SparkModel.predict`` takes.
            arguments: as in ``SparkModel.predict``.
            more: as in ``SparkModel.predict``.

        Returns:
            For a Vector a Vector, and for a Matrix a Matrix, computed in this process; otherwise the result
            of ``SparkModel.predict``.
        """
        if isinstance(x, Vector):
            return to_vector(execution.predict(self.model, from_vector(x)[None], 1)[0])
        if isinstance(x, Matrix):
            return to_matrix(execution.predict(self.model, from_matrix(x), 1024))
        return super().predict(x, *arguments, **more)


def _one_hot(points: RDD[LabeledPoint], classes: int) -> RDD[tuple[Array, Array]]:
    def pair(point: LabeledPoint) -> tuple[Array, Array]:
        import numpy

        label = point.label
        if not 0 <= label < classes or label != int(label):
            # Imported here, because executors may not have sparkdl yet when they unpickle this function.
            from sparkdl.errors import DataError

            raise DataError(NO_CLASS.format(classes=classes, label=label))
        return point.features.toArray(), numpy.eye(classes, dtype="float32")[int(label)]

    return points.map(pair)


def to_labeled_point(
    context: SparkContext, features: ArrayLike, labels: ArrayLike, categorical: bool = False
) -> RDD[LabeledPoint]:
    """Return an RDD of LabeledPoint from two arrays of equal length.

    Args:
        context: the SparkContext.
        features: shape (rows, features).
        labels: shape (rows,), or (rows, classes) if ``categorical``.
        categorical: whether to convert labels, which are one-hot vectors, to class indices.

    Raises:
        DataError: an array has a different shape.
    """
    features, labels = _aligned(features, labels, categorical)
    pairs = zip(labels.tolist(), features, strict=True)
    return context.parallelize([LabeledPoint(label, Vectors.dense(row)) for label, row in pairs])


def from_labeled_point(
    points: RDD[LabeledPoint], categorical: bool = False, nb_classes: int | None = None
) -> tuple[Array, Array]:
    """Return the features and the labels of an RDD of LabeledPoint as float64 arrays.

    Args:
        points: the RDD.
        categorical: whether to convert labels, which are class indices, to one-hot vectors.
        nb_classes: number of classes; by default the largest label plus 1.

    Raises:
        DataError: ``categorical`` is True, and a label is not a class index.
    """
    pairs = points.map(lambda point: (point.features.toArray(), point.label)).collect()
    return _arrays(pairs, categorical, nb_classes)


def to_data_frame(
    context: SparkContext, features: ArrayLike, labels: ArrayLike, categorical: bool = False
) -> DataFrame:
    """Return a DataFrame with columns ``features`` (vectors of Spark ML) and ``label`` from two arrays.

    Args:
        context: the SparkContext.
        features: shape (rows, features).
        labels: shape (rows,), or (rows, classes) if ``categorical``.
        categorical: whether to convert labels, which are one-hot vectors, to class indices.

    Raises:
        DataError: an array has a different shape.
    """
    features, labels = _aligned(features, labels, categorical)
    rows = list(zip(features.astype(float).tolist(), labels.astype(float).tolist(), strict=True))
    frame = SparkSession(context).createDataFrame(rows, "features array<double>, label double")
    return frame.withColumn("features", array_to_vector(frame["features"]))


def from_data_frame(
    frame: DataFrame,
    categorical: bool = False,
    nb_classes: int | None = None,
    features_col: str = "features",
    label_col: str = "label",
) -> tuple[Array, Array]:
    """Return the features and the labels of a DataFrame as float64 arrays.

    Args:
        frame: the DataFrame.
        categorical: whether to convert labels, which are class indices, to one-hot vectors.
        nb_classes: number of classes; by default the largest label plus 1.
        features_col: the column of vectors or arrays.
        label_col: the column of labels.

    Raises:
        ConfigError: the DataFrame has no such column.
        DataError: ``categorical`` is True, and a label is not a class index.
    """
    found = resolve(frame, (features_col, label_col))
    rows = frame.select(found[features_col].column, found[label_col].column).collect()
    pairs = [(row[0].toArray() if hasattr(row[0], "toArray") else row[0], row[1]) for row in rows]
    return _arrays(pairs, categorical, nb_classes)


def to_matrix(array: ArrayLike) -> DenseMatrix:
    """Return a two-dimensional array as a Matrix.

    Raises:
        DataError: the array does not have two dimensions.
    """
    array = np.asarray(array)
    if array.ndim != 2:
        raise DataError(f"Expected an array of two dimensions for a matrix; got shape {array.shape}.")
    return DenseMatrix(len(array), array.shape[1], array.ravel(order="F"))


def from_matrix(matrix: Matrix) -> Array:
    """Return a Matrix as an array of shape (rows, columns)."""
    return np.asarray(matrix.toArray())


def to_vector(array: ArrayLike) -> DenseVector:
    """Return a one-dimensional array as a Vector.

    Raises:
        DataError: the array does not have one dimension.
    """
    array = np.asarray(array)
    if array.ndim != 1:
        raise DataError(f"Expected an array of one dimension for a vector; got shape {array.shape}.")
    return Vectors.dense(array)


def from_vector(vector: Vector) -> Array:
    """Return a Vector as an array of shape (values,)."""
    return np.asarray(vector.toArray())


def _aligned(features: ArrayLike, labels: ArrayLike, categorical: bool) -> tuple[Array, Array]:
    features, labels = np.asarray(features), np.asarray(labels)
    labels = labels.argmax(axis=-1) if categorical else labels
    if features.ndim != 2 or labels.shape not in ((len(features),), (len(features), 1)):
        raise DataError(
            "Expected features of shape (rows, features) and one label per row (one-hot if "
            f"categorical=True); got shapes {features.shape} and {labels.shape}."
        )
    return features, labels.reshape(-1)


def _arrays(
    pairs: Sequence[tuple[ArrayLike, float]], categorical: bool, classes: int | None
) -> tuple[Array, Array]:
    features, labels = (np.array([pair[place] for pair in pairs], np.float64) for place in (0, 1))
    if categorical:
        classes = classes or int(labels[np.isfinite(labels)].max(initial=-1)) + 1
        wrong = labels[~np.isin(labels, np.arange(classes))]
        if len(wrong):
            raise DataError(NO_CLASS.format(classes=classes, label=wrong[0]))
        labels = np.eye(classes)[labels.astype(int)]
    return features, labels
