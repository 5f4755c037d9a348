"""Models without labels train by losses that layers add or by a custom train_step."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError
from sparkdl.ml import KerasEstimator

X = np.random.default_rng(4).normal(size=(24, 6)).astype("float32")
HELD = X[:9]
# A batch of all rows: its gradient does not depend on their order.
ONE_BATCH = {"epochs": 2, "batch_size": 24, "verbose": 0}


class Reconstruct(layers.Layer):
    """A layer that adds the distance of two arrays to the loss."""

    def call(self, pair):
        self.add_loss(ops.mean(ops.square(pair[0] - pair[1])))
        return pair[1]


class Autoencoder(keras.Model):
    """A model whose custom steps take x alone, with a metric that Keras's compile does not know."""

    def __init__(self):
        super().__init__(name="autoencoder")
        self.encode, self.decode = layers.Dense(2, name="encode"), layers.Dense(6, name="decode")
        self.distance = keras.metrics.Mean(name="distance")

    @property
    def metrics(self):
        return [self.distance]

    def call(self, x):
        return self.decode(self.encode(x))

    def _measure(self, x):
        loss = ops.mean(ops.square(x - self(x)))
        self.distance.update_state(loss, sample_weight=ops.shape(x)[0])
        return loss

    def train_step(self, x):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self._measure(x)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"distance": self.distance.result()}

    def test_step(self, x):
        self._measure(x)
        return {"distance": self.distance.result()}


def adding():
    """Return a model whose layer adds the loss."""
    keras.utils.set_random_seed(5)
    x = keras.Input((6,), name="x")
    decoded = layers.Dense(6, name="decode")(layers.Dense(2, name="encode")(x))
    model = keras.Model(x, Reconstruct(name="apart")([x, decoded]), name="adding")
    model.compile(keras.optimizers.SGD(0.2))
    return model


def stepping():
    """Return a model with custom steps."""
    keras.utils.set_random_seed(5)
    model = Autoencoder()
    model.compile(keras.optimizers.SGD(0.2))
    model(X[:1])
    return model


@pytest.fixture(scope="module")
def rows(spark):
    """The same rows in each form that fit takes, with their validation data."""
    context = spark.sparkContext
    schema = "features array<float>, held boolean"
    frame, held = (
        spark.createDataFrame([(row.tolist(), False) for row in part], schema) for part in (X, HELD)
    )

    def dataset(rows):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(rows).batch(5)

    def function(make):
        return tuple(lambda worker, workers, part=part: make(part[worker::workers]) for part in (X, HELD))

    def rdds(make):
        return tuple(context.parallelize([make(row) for row in part], 2) for part in (X, HELD))

    return {
        "arrays": (X, (HELD,)),
        "bare": (X, HELD),
        "frame": (frame, held),
        "rdd": rdds(np.asarray),
        "rdd of tuples": rdds(lambda row: (row,)),
        "rdd of lists": rdds(np.ndarray.tolist),
        "function of tuples": function(lambda rows: (rows,)),
        "function": function(np.asarray),
        "function of batches": function(dataset),
    }


KINDS = (
    "arrays",
    "bare",
    "frame",
    "rdd",
    "rdd of tuples",
    "rdd of lists",
    "function of tuples",
    "function",
    "function of batches",
)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_layers_add_train_without_labels(rows, kind):
    """Weights and history are those of plain Keras for every form of the rows."""
    x, held = rows[kind]
    model, reference = adding(), adding()
    theirs = reference.fit(X, validation_data=(HELD,), **ONE_BATCH).history
    ours = SparkModel(model, num_workers=2).fit(x, validation_data=held, **ONE_BATCH).history

    assert theirs.keys() == ours.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("kind", ["arrays", "frame", "function of batches"])
def test_steps_of_a_models_own_get_x_alone(rows, kind):
    """A custom train_step gets x alone, as in Keras, and its own metric is reported."""
    x, held = rows[kind]
    reference = stepping()
    theirs = reference.fit(X, validation_data=(HELD,), **ONE_BATCH).history
    spark_model = SparkModel(stepping, num_workers=2)
    ours = spark_model.fit(x, validation_data=held, **ONE_BATCH).history

    assert {"distance", "val_distance"} == ours.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    for mine, expected in zip(spark_model.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["arrays", "frame", "rdd", "function"])
def test_evaluate_needs_no_labels_either(rows, kind):
    """Without labels evaluate returns the loss of plain Keras over all rows."""
    model = adding()

    assert model.evaluate(X, verbose=0) == pytest.approx(SparkModel(model).evaluate(rows[kind][0]), rel=1e-5)


@pytest.mark.whole
def test_rows_without_labels_are_held_out(rows):
    """A validation_split of arrays takes the last rows, as in Keras; an indicator column selects others."""
    theirs = adding().fit(X, validation_split=0.25, shuffle=False, **ONE_BATCH).history
    ours = (
        SparkModel(adding(), num_workers=2).fit(X, validation_split=0.25, shuffle=False, **ONE_BATCH).history
    )
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)

    frame = rows["frame"][0].selectExpr("features", "features[0] > 0 as held")
    options = {"label_col": None, "validation_indicator_col": "held"}
    ours = SparkModel(adding(), num_workers=2).fit(frame, **options, **ONE_BATCH).history
    held = X[:, 0] > 0
    theirs = adding().fit(X[~held], validation_data=X[held], **ONE_BATCH).history
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("label", ["default", "", None])
def test_an_estimator_trains_without_labels(rows, label):
    """An Estimator trains without labels if the frame has no label column or labelCol is empty."""
    frame, named = rows["frame"][0], {} if label == "default" else {"labelCol": label}
    if label == "":
        frame = frame.selectExpr("features", "'none' as label")
    params = {"model": adding(), "numWorkers": 1, "epochs": 2, "batchSize": 24}
    trained = KerasEstimator(**params, **named).fit(frame)

    np.testing.assert_allclose(
        trained.summary.objectiveHistory, adding().fit(X, **ONE_BATCH).history["loss"], rtol=1e-5
    )


def refused(error, fit):
    with pytest.raises(error) as caught:
        fit()
    return str(caught.value)


@pytest.mark.whole
def test_a_loss_that_compares_labels_asks_for_them(rows, problem):
    """A loss that needs labels refuses rows without them before a worker starts, for each form of rows."""
    model = SparkModel(problem.model(), num_workers=2)

    assert "y should be passed with x=numpy.ndarray, since the loss" in refused(
        ConfigError, lambda: model.fit(X)
    )
    assert "y should be passed" in refused(ConfigError, lambda: model.evaluate(X))
    assert "y should be passed with validation_data" in refused(
        ConfigError, lambda: model.fit(problem.x, problem.y, validation_data=(HELD,))
    )
    assert "label_col should be the name of the column" in refused(
        ConfigError, lambda: model.fit(rows["frame"][0], label_col=None)
    )
    assert "Expected an RDD of tuples (x, y)" in refused(
        DataError, lambda: model.fit(rows["rdd of tuples"][0])
    )
    assert "should return a tuple of arrays (x, y)" in refused(
        DataError, lambda: model.fit(rows["function"][0])
    )


def test_weights_of_rows_without_labels_are_refused(rows):
    """Weights of rows without labels are refused: Keras would ignore them."""
    model, ones = SparkModel(adding(), num_workers=2), np.ones(24, "float32")

    assert "sample_weight needs rows with labels" in refused(
        ConfigError, lambda: model.fit(X, sample_weight=ones)
    )
    assert "class_weight needs labels" in refused(ConfigError, lambda: model.fit(X, class_weight={0: 2.0}))
    assert "sample_weight needs rows with labels" in refused(
        ConfigError, lambda: model.fit(rows["frame"][0], label_col=[], sample_weight="held")
    )
