"""MLlib's LabeledPoints train, its vectors and matrices are predicted, and arrays convert both ways."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pyspark.mllib.linalg import Matrices, SparseVector, Vectors
from pyspark.mllib.regression import LabeledPoint

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError
from sparkdl.mllib import (
    SparkMLlibModel,
    from_data_frame,
    from_labeled_point,
    from_matrix,
    from_vector,
    to_data_frame,
    to_labeled_point,
    to_matrix,
    to_vector,
)

MASTERS = ("local", "local-cluster", "standalone")


@pytest.mark.whole
@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "hogwild"])
def test_labeled_points_train_as_pairs_do(spark, problem, mode):
    """LabeledPoints train in every mode; in synchronous mode the weights are those of equal pairs."""
    points = to_labeled_point(spark.sparkContext, problem.x, problem.y)
    model, alike = problem.model(), problem.model()

    history = SparkMLlibModel(model, mode=mode, num_workers=2).fit(
        points, epochs=3, batch_size=16, verbose=0, validation_split=0.1, seed=1
    )

    assert history.history["loss"][-1] < history.history["loss"][0]
    assert 3 == len(history.history["val_loss"])
    if mode == "synchronous":
        pairs = points.map(lambda point: (point.features.toArray().astype("float32"), point.label))
        SparkModel(alike, num_workers=2).fit(
            pairs, epochs=3, batch_size=16, verbose=0, validation_split=0.1, seed=1
        )
        for one, other in zip(model.get_weights(), alike.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.whole
def test_vectors_and_matrices_are_predicted_from(spark, problem):
    """A Vector is one row and gives a Vector, a Matrix gives a Matrix; RDDs of either kind are lazy."""
    model = problem.model()
    spark_model = SparkMLlibModel(model, num_workers=2)
    expected = model.predict(problem.x, verbose=0)

    one = spark_model.predict(Vectors.dense(problem.x[0]))
    sparse = spark_model.predict(SparseVector(6, list(enumerate(problem.x[0].tolist()))))
    many = spark_model.predict(to_matrix(problem.x[:5]))

    np.testing.assert_allclose(expected[0], one.toArray(), atol=1e-6)
    np.testing.assert_allclose(expected[0], sparse.toArray(), atol=1e-6)
    np.testing.assert_allclose(expected[:5], many.toArray(), atol=1e-6)
    points = to_labeled_point(spark.sparkContext, problem.x, problem.y)
    for rdd in (points, points.map(lambda point: point.features)):
        np.testing.assert_allclose(expected, spark_model.predict(rdd).collect(), atol=1e-5)


@pytest.mark.whole
def test_class_indices_become_one_hot_vectors(spark, problem):
    """categorical=True one-hot encodes class indices; a label that is not a class index ends the fit."""
    points = to_labeled_point(spark.sparkContext, problem.x, np.eye(3)[problem.y], categorical=True)
    model, alike = problem.model(loss="categorical_crossentropy"), problem.model()

    for each, options in ((SparkMLlibModel(model), {"categorical": True}), (SparkMLlibModel(alike), {})):
        each.fit(points, None, 16, 2, 0, None, 0.0, points, seed=1, **options)
        assert 2 == len(each.history.history["val_loss"])

    for one, other in zip(model.get_weights(), alike.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    spark_model = SparkMLlibModel(model)
    spark_model.fit(points, categorical=True, validation_data=points, verbose=0)
    loss = spark_model.evaluate(points, categorical=True)[0]
    assert loss == pytest.approx(spark_model.history.history["val_loss"][-1], rel=1e-4)
    worse = points.union(spark.sparkContext.parallelize([LabeledPoint(3, problem.x[0])], 1))
    with pytest.raises(DataError, match=r"class indices below 3; got 3\.0"):
        SparkMLlibModel(model).fit(worse, verbose=0, categorical=True)


def test_only_points_become_one_hot_vectors(spark, problem):
    """categorical=True needs an RDD of LabeledPoint whose labels are class indices."""
    spark_model = SparkMLlibModel(problem.model(loss="categorical_crossentropy"))
    for call in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigError, match="x should be an RDD of LabeledPoint .*; got ndarray"):
            call(problem.x, problem.y, categorical=True)
    points = [LabeledPoint(label, problem.x[0]) for label in (0, 1, 0.5, 2, 3)]
    for label, few in ((0.5, points), (3.0, points[3:]), (float("nan"), [LabeledPoint("nan", [1])])):
        with pytest.raises(DataError, match=rf"class indices below 3; got {label}\. Correct"):
            from_labeled_point(spark.sparkContext.parallelize(few, 1), categorical=True, nb_classes=3)
    with pytest.raises(DataError, match=r"class indices below 1; got nan\. Correct"):
        from_labeled_point(
            spark.sparkContext.parallelize([LabeledPoint(0, [1]), LabeledPoint("nan", [1])], 1), True
        )


@pytest.mark.one_case
@pytest.mark.parametrize("categorical", [False, True])
def test_points_and_frames_go_back_to_arrays(spark, problem, categorical):
    """LabeledPoints and DataFrames convert back to the same features and labels, in order."""
    labels = np.eye(3)[problem.y] if categorical else problem.y
    context = spark.sparkContext

    points = from_labeled_point(to_labeled_point(context, problem.x, labels, categorical), categorical, 3)
    frame = to_data_frame(context, problem.x, labels, categorical)
    rows = from_data_frame(frame, categorical)

    assert {"features": "vector", "label": "double"} == dict(frame.dtypes)
    for features, found in (points, rows):
        np.testing.assert_allclose(problem.x, features)
        np.testing.assert_array_equal(labels, found)


def test_arrays_that_are_no_points_are_refused(spark, problem):
    """Arrays with too few labels, or features that are not rows, are refused with their shapes."""
    with pytest.raises(DataError, match=r"got shapes \(203, 6\) and \(202,\)"):
        to_labeled_point(spark.sparkContext, problem.x, problem.y[1:])
    with pytest.raises(DataError, match=r"got shapes \(203,\) and \(203,\)"):
        to_data_frame(spark.sparkContext, problem.y, problem.y)
    model = keras.Sequential([keras.Input((6, 1)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="Pass nb_classes"):
        SparkMLlibModel(model).fit(problem.rdd(spark, 203), categorical=True)


@given(arrays.arrays("float64", st.tuples(st.integers(1, 4), st.integers(1, 4)), elements=st.floats(-9, 9)))
def test_matrices_and_vectors_go_there_and_back(array):
    """Rows stay rows, although MLlib stores matrices by column."""
    np.testing.assert_array_equal(array, from_matrix(to_matrix(array)))
    np.testing.assert_array_equal(array, from_matrix(Matrices.dense(*array.shape, array.ravel(order="F"))))
    np.testing.assert_array_equal(array[0], from_vector(to_vector(array[0])))
    with pytest.raises(DataError, match="an array of two dimensions for a matrix"):
        to_matrix(array[0])
    with pytest.raises(DataError, match="an array of one dimension for a vector"):
        to_vector(array)
