"""Arrays in every form that Keras takes train, evaluate and predict as NumPy arrays do."""

import keras
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from keras import layers

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError

random = np.random.default_rng(0)
X = (random.normal(size=(32, 6)) * (random.random((32, 6)) > 0.6)).astype("float32")
Y, W = random.normal(size=(32, 1)).astype("float32"), random.random(32).astype("float32")
OPTIONS = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0}


def network(inputs=1):
    keras.utils.set_random_seed(0)
    x = [keras.Input((6,), name=f"x{index}") for index in range(inputs)]
    joined = layers.Concatenate(name="joined")(x) if inputs > 1 else x[0]
    y = layers.Dense(1, name="y")(layers.Dense(3, "tanh", name="hidden")(joined))
    model = keras.Model(x if inputs > 1 else x[0], y, name=f"network_{inputs}")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def tensor(of):
    """Return a function that makes a tensor of a library, or skips the test if it is not installed."""

    def make(array):
        if of == "tensorflow":
            return pytest.importorskip("tensorflow").constant(array)
        if of == "torch":
            return pytest.importorskip("torch").tensor(array, requires_grad=True)
        return pytest.importorskip("jax.numpy").asarray(array)

    return make


def sparse_tensor(array):
    return pytest.importorskip("tensorflow").sparse.from_dense(array) if array.shape[1:] == (6,) else array


def matrix(form):
    return lambda array: getattr(scipy.sparse, form)(array) if array.shape[1:] == (6,) else array


def table(array):
    return pd.DataFrame(array).astype("Float32") if array.shape[1:] == (6,) else pd.Series(array.ravel())


MAKE = {
    "csr": matrix("csr_matrix"),
    "csc": matrix("csc_array"),
    "coo": matrix("coo_matrix"),
    "SparseTensor": sparse_tensor,
    "tensorflow": tensor("tensorflow"),
    "torch": tensor("torch"),
    "jax": tensor("jax"),
    "pandas": table,
    "list of one": lambda array: [array],
    "lists": np.ndarray.tolist,
}


@pytest.fixture(scope="module")
def plain():
    """The model, history, score and predictions of plain Keras for the arrays."""
    model = network()
    history = model.fit(X, Y, validation_split=0.25, sample_weight=W, **OPTIONS).history
    return model, history, model.evaluate(X, Y, sample_weight=W, verbose=0), model.predict(X, verbose=0)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", MAKE)
def test_every_form_of_array_is_the_same_rows(spark, plain, kind):
    """Every form of array gives the weights, history, scores and predictions of plain Keras."""
    x, y, weights = map(MAKE[kind], (X, Y, W))
    reference, history, score, predicted = plain
    spark_model = SparkModel(network(), num_workers=2)
    ours = spark_model.fit(x, y, validation_split=0.25, sample_weight=weights, **OPTIONS).history

    for name, values in history.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)
    for mine, theirs in zip(spark_model.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert score == pytest.approx(spark_model.evaluate(x, y, sample_weight=weights), rel=1e-5)
    np.testing.assert_allclose(spark_model.predict(x), predicted, atol=1e-5)


@pytest.mark.whole
def test_forms_may_differ_between_inputs_and_between_training_and_validation(spark):
    """Dense and sparse inputs mix, in a list, in a function's rows, and between training and validation."""
    history = network(2).fit([X, X], Y, validation_data=([X, X], Y), **OPTIONS).history
    csr = scipy.sparse.csr_matrix(X)
    ours = SparkModel(network(2), num_workers=2).fit(
        [csr, pd.DataFrame(X)], Y, validation_data=([X, csr], Y), **OPTIONS
    )
    function = SparkModel(network(2), num_workers=2).fit(
        lambda worker, workers: ((X[worker::workers], csr[worker::workers]), Y[worker::workers]), **OPTIONS
    )

    for name, values in history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=1e-5)
    np.testing.assert_allclose(function.history["loss"], history["loss"], rtol=1e-5)


@pytest.mark.whole
def test_no_rows_have_no_predictions(spark):
    """Predictions of no rows have the model's structure and shape, and length 0."""
    spark_model = SparkModel(network())
    for x in (X[:0], scipy.sparse.csr_matrix(X)[:0], pd.DataFrame(X[:0]), []):
        assert (0, 1) == spark_model.predict(x).shape
    frame = spark.createDataFrame([], "features array<float>")

    assert [] == spark_model.predict(spark.sparkContext.parallelize([], 2)).collect()
    assert [] == spark_model.predict(frame).collect()
    assert "float" == spark_model.predict(frame).schema["prediction"].dataType.simpleString()

    x = keras.Input((6,), name="x")
    two = keras.Model(x, {name: layers.Dense(size, name=name)(x) for name, size in (("a", 1), ("b", 2))})
    two.compile("sgd", "mse")
    assert {"a": (0, 1), "b": (0, 2)} == {
        name: part.shape for name, part in SparkModel(two).predict(X[:0]).items()
    }


def test_what_is_no_array_is_refused_by_name(spark):
    """Sparse labels, pandas columns without numbers, and datasets are refused by name."""
    spark_model = SparkModel(network(), num_workers=2)
    with pytest.raises(DataError, match="Expected y to be dense"):
        spark_model.fit(X, scipy.sparse.csr_matrix(Y))
    for call in (spark_model.predict, lambda x: spark_model.fit(x, Y), lambda x: spark_model.evaluate(x, Y)):
        with pytest.raises(DataError, match=r"Expected x\['city'\] to hold numbers; row 0 has 'p'"):
            call(pd.DataFrame(X).assign(city="p"))
    with pytest.raises(ConfigError, match="x should be NumPy arrays"):
        spark_model.predict(pytest.importorskip("tensorflow").data.Dataset.from_tensors(X))
