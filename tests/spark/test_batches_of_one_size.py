"""A fixed batch size is enforced where a layer relies on it or is stateful, and ignored elsewhere."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.ml import KerasTransformer

random = np.random.default_rng(0)
X = random.normal(size=(64, 5, 2)).astype("float32")
Y = random.normal(size=(64, 1)).astype("float32")
OPTIONS = {"epochs": 2, "shuffle": False, "verbose": 0}
BODIES = {
    "stateful": lambda size: layers.GRU(3, stateful=True),
    "reshaped": lambda size: layers.Lambda(lambda x: ops.reshape(x, (size, 10)), output_shape=(10,)),
    "named": lambda size: layers.Flatten(),  # accepts batches of any size
}


def network(body, size=16):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(batch_shape=(size, 5, 2)), BODIES[body](size), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.whole
@pytest.mark.parametrize(
    ("body", "size"), [("stateful", 16), ("stateful", 1), ("reshaped", 16), ("named", 16)]
)
def test_one_worker_trains_in_batches_of_this_size(spark, body, size):
    """A model with a fixed batch size has the weights, history, scores and predictions of plain Keras."""
    model, reference = network(body, size), network(body, size)
    theirs = reference.fit(X, Y, batch_size=size, **OPTIONS).history
    ours = SparkModel(model).fit(X, Y, batch_size=size, **OPTIONS)

    np.testing.assert_allclose(ours.history["loss"], theirs["loss"], rtol=1e-5)
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)

    score = network(body, size).evaluate(X, Y, batch_size=size, verbose=0)
    assert score == pytest.approx(SparkModel(network(body, size)).evaluate(X, Y), rel=1e-5)
    predicted = network(body, size).predict(X, batch_size=size, verbose=0)
    np.testing.assert_allclose(SparkModel(network(body, size)).predict(X), predicted, atol=1e-5)
    np.testing.assert_allclose(SparkModel(network(body, size)).predict(X[:50]), predicted[:50], atol=1e-5)


def test_partitions_are_predicted_in_batches_of_this_size(spark):
    """A smaller last batch of a partition is padded with its last row to predict it."""
    expected = network("reshaped").predict(X, batch_size=16, verbose=0)
    rdd = spark.sparkContext.parallelize(list(X), 3)

    np.testing.assert_allclose(SparkModel(network("reshaped")).predict(rdd).collect(), expected, atol=1e-5)


@pytest.mark.whole
def test_columns_are_predicted_in_batches_of_this_size(spark):
    """predict_udf and a stage predict in batches of the fixed size, and refuse a different size."""
    model = network("reshaped")
    frame = spark.createDataFrame([(X[0].tolist(),)], "features array<array<float>>")
    expected = model.predict(X[:1].repeat(16, 0), batch_size=16, verbose=0)[0, 0]

    for function in (predict_udf(model), predict_udf(model, batch_size=16)):
        assert expected == pytest.approx(frame.select(function("features")).first()[0], abs=1e-5)
    row = KerasTransformer(model=model).transform(frame).first()
    assert expected == pytest.approx(row.prediction, abs=1e-5)
    only = "takes only batches of 16 rows"
    assert only in refused(ConfigError, lambda: predict_udf(model, batch_size=8))
    stage = KerasTransformer(model=model, inferenceBatchSize=8)
    words = refused(ConfigError, lambda: stage.transform(frame))
    assert only in words
    assert words.endswith("Pass inferenceBatchSize=16.")


def refused(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("body", ["stateful", "reshaped"])
def test_what_does_not_fit_the_size_is_refused_in_its_words(spark, body):
    """Several workers, another batch size, and a smaller last batch are refused where the size is fixed."""
    model = SparkModel(network(body))
    only = "takes only batches of 16 rows"
    for frequency in ("batch", "epoch"):
        several = SparkModel(network(body), num_workers=2, frequency=frequency)
        words = refused(ConfigError, lambda several=several: several.fit(X, Y, batch_size=16))
        assert only in words
        assert "several workers train on batches of varying sizes; got num_workers=2" in words
    for call in (lambda: model.fit(X, Y, batch_size=32), lambda: model.predict(X, batch_size=8)):
        assert only in refused(ConfigError, call)
    words = refused(DataError, lambda: model.fit(X[:60], Y[:60], **OPTIONS))
    assert f"{only[6:]}; 60 rows leave a last batch of 12" in words


def test_a_size_that_no_layer_needs_binds_nobody(spark):
    """A fixed batch size that no layer relies on is ignored, as in Keras, also by several workers."""
    theirs = network("named").fit(X, Y, batch_size=32, **OPTIONS).history
    ours = SparkModel(network("named"), num_workers=2).fit(X, Y, batch_size=32, **OPTIONS).history

    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)


def test_stateful_layers_predict_arrays_only(spark):
    """A model with stateful layers does not predict an RDD, whose batches have no order."""
    model, rdd = SparkModel(network("stateful")), spark.sparkContext.parallelize(list(X), 3)

    assert "stateful layers" in refused(ModelError, lambda: model.predict(rdd))


class Own(keras.Model):
    """A subclassed model, which has no shapes before it is called."""

    def __init__(self):
        super().__init__()
        self.flat, self.out = layers.Flatten(), layers.Dense(1)

    def call(self, x):
        return self.out(self.flat(x))


LATE = {
    "sequential": lambda: keras.Sequential([layers.Flatten(), layers.Dense(1)]),
    "own class": Own,
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("called", [False, True])
def test_a_model_that_was_not_built_or_was_called_on_one_row_takes_any_number_of_rows(spark, kind, called):
    """Two workers train a model that is unbuilt, or was called on one row, as Keras trains it."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(LATE[kind]())
        if called:
            models[-1](X[:1])
        models[-1].compile(keras.optimizers.SGD(0.1), "mse")
    model, reference = models

    theirs = reference.fit(X[:50], Y[:50], batch_size=16, **OPTIONS).history
    ours = SparkModel(model, num_workers=2).fit(X[:50], Y[:50], batch_size=16, **OPTIONS)

    np.testing.assert_allclose(ours.history["loss"], theirs["loss"], rtol=1e-5)
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    assert [part.shape for part in getattr(reference, "inputs", None) or ()] == [
        part.shape for part in getattr(model, "inputs", None) or ()
    ]
