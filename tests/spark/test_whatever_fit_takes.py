"""Arguments of model.fit work: several inputs and outputs, weights, continued epochs."""

import keras
import numpy as np
import pytest
from keras import layers
from pyspark.sql import functions

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError

ROWS = 120
POINTS, LABELS = np.zeros((3, 6), np.float32), np.zeros(3, np.int64)


class Two:
    """Rows of words and points with two labels each, and a model for them."""

    def __init__(self):
        random = np.random.default_rng(2)
        self.x = {
            "words": random.integers(0, 7, (ROWS, 3)).astype("int32"),
            "points": random.normal(size=(ROWS, 4)).astype("float32"),
        }
        total = self.x["points"].sum(1)
        self.y = {"sign": (total > 0).astype("float32"), "sum": total}
        self.weights = {"sign": np.linspace(0, 2, ROWS), "sum": np.linspace(1, 0, ROWS)}

    def model(self):
        keras.utils.set_random_seed(3)
        words, points = keras.Input((3,), dtype="int32", name="words"), keras.Input((4,), name="points")
        read = layers.Flatten(name="flat")(layers.Embedding(7, 4, name="read")(words))
        both = layers.Concatenate(name="all")([read, points])
        both = layers.Dense(8, "tanh", name="both")(both)
        sign = layers.Dense(1, "sigmoid", name="sign")(both)
        model = keras.Model(
            {"words": words, "points": points}, {"sign": sign, "sum": layers.Dense(1, name="sum")(both)}
        )
        losses = {"sign": "binary_crossentropy", "sum": "mse"}
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), losses, weighted_metrics={"sum": ["mae"]})
        return model

    def rows(self, context, parts):
        """Return an RDD whose partitions, read in turns, hold the rows in order."""
        pairs = [
            tuple({name: part[i] for name, part in of.items()} for of in (self.x, self.y, self.weights))
            for i in range(ROWS)
        ]
        return context.parallelize(sum((pairs[k::parts] for k in range(parts)), []), parts)

    def frame(self, spark):
        """Return a DataFrame of the rows."""
        table = [
            (i, words.tolist(), *map(float, points), float(sign), float(total))
            for i, (words, points, sign, total) in enumerate(
                zip(self.x["words"], self.x["points"], self.y["sign"], self.y["sum"], strict=True)
            )
        ]
        return spark.createDataFrame(
            table,
            "row int, words array<int>, a double, b double, c double, d double, sign double, sum double",
        )


@pytest.fixture(scope="module")
def two():
    return Two()


def close(model, reference, limit=1e-5):
    pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
    return all(np.allclose(ours, theirs, atol=limit) for ours, theirs in pairs)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["arrays", "rdd"])
def test_dicts_of_inputs_outputs_and_weights(spark, two, kind):
    """Dicts of inputs, outputs and weights train; evaluate and predict return Keras's structures."""
    reference = two.model()
    theirs = reference.fit(two.x, two.y, 20, 2, shuffle=False, verbose=0, sample_weight=two.weights)
    spark_model = SparkModel(two.model(), num_workers=2)
    if kind == "arrays":
        data, weights = (two.x, two.y), two.weights
    else:
        data, weights = (two.rows(spark.sparkContext, 2), None), None
    history = spark_model.fit(*data, 20, 2, shuffle=False, verbose=0, sample_weight=weights)
    # Keras averages the loss of one output over batches, so all batches must have one size.
    expected = reference.evaluate(two.x, two.y, 60, 0, two.weights, return_dict=True)
    measured = spark_model.evaluate(*data, 60, 0, weights, return_dict=True)
    predicted, wanted = spark_model.predict(two.x), reference.predict(two.x, verbose=0)

    assert close(spark_model.model, reference)
    assert history.history.keys() == theirs.history.keys()
    assert measured == pytest.approx(expected, rel=1e-4)
    for name in wanted:
        np.testing.assert_allclose(predicted[name], wanted[name], atol=1e-4)


def test_predictions_of_an_rdd_have_the_structure_of_the_outputs(spark, two):
    """Each row's prediction is a dict; rows may be x alone, or (x, y)."""
    model = two.model()
    wanted = model.predict(two.x, verbose=0)
    rows = two.rows(spark.sparkContext, 1)
    first = SparkModel(model).predict(rows).take(3)
    alone = SparkModel(model).predict(rows.map(lambda row: row[0])).take(3)

    for index in range(3):
        assert {"sign", "sum"} == first[index].keys() == alone[index].keys()
        np.testing.assert_allclose(first[index]["sum"], wanted["sum"][index], atol=1e-5)


@pytest.mark.whole
def test_columns_of_a_data_frame_by_the_names_of_the_inputs(spark, two):
    """Columns form the inputs, several of them one array; a weight is a column; predictions are a struct."""
    frame = two.frame(spark).withColumn("weight", functions.col("sign") + 0.5)
    names = {
        "features_col": {"words": "words", "points": ["a", "b", "c", "d"]},
        "label_col": {"sign": "sign", "sum": "sum"},
    }
    spark_model = SparkModel(two.model(), num_workers=2)
    history = spark_model.fit(
        frame,
        batch_size=20,
        epochs=2,
        verbose=0,
        seed=1,
        sample_weight="weight",
        validation_data=frame,
        **names,
    )
    predicted = spark_model.predict(frame, features_col=names["features_col"]).orderBy("row").collect()
    wanted = spark_model.model.predict(two.x, verbose=0)["sum"][:, 0]
    held = spark_model.model.evaluate(
        two.x, two.y, verbose=0, return_dict=True, sample_weight=(two.y["sign"] + 0.5).astype("float32")
    )

    np.testing.assert_allclose([row.prediction.sum for row in predicted], wanted, atol=1e-5)
    assert history.history["val_loss"][-1] == pytest.approx(held["loss"], rel=1e-4)


@pytest.mark.whole
def test_a_column_of_weights_for_each_output_of_a_data_frame(spark, two):
    """A dict of column names weighs the rows of each output separately, as arrays do in model.fit."""
    share = functions.col("row") / (ROWS - 1)
    frame = two.frame(spark).withColumn("rising", 2 * share).withColumn("falling", 1 - share)
    names = {
        "features_col": {"words": "words", "points": ["a", "b", "c", "d"]},
        "label_col": {"sign": "sign", "sum": "sum"},
        "sample_weight": {"sign": "rising", "sum": "falling"},
    }
    spark_model, reference = SparkModel(two.model(), num_workers=2), two.model()
    # The order of a DataFrame's rows is not fixed, so a batch has all of them.
    history = spark_model.fit(frame, batch_size=ROWS, epochs=8, verbose=0, **names).history
    expected = reference.fit(two.x, two.y, ROWS, 8, 0, sample_weight=two.weights).history

    scores = reference.evaluate(two.x, two.y, ROWS, 0, two.weights, return_dict=True)
    ours = spark_model.evaluate(frame, batch_size=ROWS, return_dict=True, **names)

    assert close(spark_model.model, reference)
    assert expected.keys() == history.keys()
    assert scores.keys() == ours.keys()
    # Keras averages the loss of one output over batches, which are uneven on workers
    for name in ("loss", "sum_mae"):
        assert expected[name] == pytest.approx(history[name], rel=1e-4)
        assert scores[name] == pytest.approx(ours[name], rel=1e-4)


@pytest.mark.whole
def test_class_weights_are_keras_s(spark, problem):
    """class_weight weighs training rows by class; validation rows weigh the same."""
    weights, split = {0: 3.0, 2: 0.25}, (problem.x[:50], problem.y[:50])
    model, reference = problem.model(), problem.model()
    options = {"verbose": 0, "shuffle": False, "class_weight": weights, "validation_data": split}
    expected = reference.fit(problem.x, problem.y, 25, 2, **options).history
    history = SparkModel(model, num_workers=2).fit(problem.x, problem.y, 25, 2, **options).history

    assert close(model, reference)
    assert expected.keys() == history.keys()
    assert expected["val_loss"] == pytest.approx(history["val_loss"], rel=1e-4)
    assert expected["loss"] == pytest.approx(history["loss"], rel=1e-4)


def test_class_weights_apply_beside_weights_of_validation_rows(spark):
    """In a DataFrame, training rows get class weights even if the validation rows have sample weights."""
    table = spark.createDataFrame([(1.0, n % 2, 5.0) for n in range(8)], "x float, y int, w double")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, "sigmoid", kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy")
    names = {"features_col": "x", "label_col": "y", "verbose": 0, "class_weight": {0: 3.0, 1: 0.5}}
    history = SparkModel(model, num_workers=1).fit(table, validation_data=(table, None, "w"), **names).history

    assert [1.75 * np.log(2)] == pytest.approx(history["loss"], rel=1e-5)


def test_validation_rows_may_have_weights_of_their_own(spark, problem):
    """validation_data may be (x, y, sample_weight) even if the training rows have no weights."""
    held = problem.x[:50], problem.y[:50], np.linspace(0, 2, 50)
    model, reference = problem.model(), problem.model()
    options = {"verbose": 0, "shuffle": False, "validation_data": held}
    expected = reference.fit(problem.x, problem.y, 25, 1, **options).history
    history = SparkModel(model, num_workers=2).fit(problem.x, problem.y, 25, 1, **options).history

    assert close(model, reference)
    assert expected["val_loss"] == pytest.approx(history["val_loss"], rel=1e-4)


@pytest.mark.whole
def test_validation_rows_of_an_rdd_need_no_weights(spark, problem):
    """Training arrays may have weights while an RDD of (x, y) validates without them."""
    model, reference = problem.model(), problem.model()
    weights, options = np.linspace(0, 2, len(problem.x)), {"verbose": 0, "shuffle": False}
    held = problem.x[:50], problem.y[:50]
    expected = reference.fit(
        problem.x, problem.y, 25, 1, sample_weight=weights, validation_data=held, **options
    )
    history = SparkModel(model, num_workers=2).fit(
        problem.x,
        problem.y,
        25,
        1,
        sample_weight=weights,
        **options,
        validation_data=spark.sparkContext.parallelize(list(zip(*held, strict=True)), 2),
    )

    assert close(model, reference)
    assert expected.history["val_loss"] == pytest.approx(history.history["val_loss"], rel=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize(("steps", "epochs"), [(3, 3), (10, 2)])
def test_steps_per_epoch_go_on_with_the_rows_that_are_left(spark, problem, steps, epochs):
    """steps_per_epoch other than the 7 of a pass continues each epoch where the last one ended."""
    model, reference = problem.model(), problem.model()
    options = {"verbose": 0, "shuffle": False, "steps_per_epoch": steps, "epochs": epochs}
    reference.fit(np.concatenate([problem.x] * 3), np.concatenate([problem.y] * 3), 29, **options)
    SparkModel(model, num_workers=2).fit(problem.x, problem.y, 29, **options)

    assert close(model, reference)


def test_validation_freq_says_after_which_epochs(spark, problem):
    """validation_freq is an interval or a list of epochs, counted from 1."""
    held = problem.x[:50], problem.y[:50]
    for freq, count in ((2, 2), ([1], 1)):
        history = SparkModel(problem.model(), num_workers=2).fit(
            problem.x, problem.y, 64, 4, verbose=0, validation_data=held, validation_freq=freq
        )
        assert len(history.history["val_loss"]) == count
        assert len(history.history["loss"]) == 4


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("frequency", "shuffle"),
    [
        ("batch", True),
        (2, False),
        ("epoch", True),
        pytest.param("batch", False, marks=pytest.mark.whole),
        pytest.param(2, True, marks=pytest.mark.whole),
        pytest.param("epoch", False, marks=pytest.mark.whole),
    ],
)
def test_training_goes_on_where_it_ended(spark, problem, frequency, shuffle):
    """fit(2n) equals fit(n) and n more epochs, with initial_epoch if rows are shuffled with a seed."""

    def model():
        return SparkModel(problem.model(keras.optimizers.Adam(0.01)), frequency=frequency, num_workers=2)

    options = {"verbose": 0, "batch_size": 32, "shuffle": shuffle, "seed": 5}
    whole, parts = model(), model()
    whole.fit(problem.x, problem.y, epochs=4, **options)
    parts.fit(problem.x, problem.y, epochs=2, **options)
    if shuffle:
        parts.fit(problem.x, problem.y, epochs=4, initial_epoch=2, **options)
    else:
        parts.fit(problem.x, problem.y, epochs=2, **options)

    for ours, theirs in zip(parts.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loaded_model_goes_on(spark, problem, tmp_path):
    """A loaded model continues training: the optimizer's state is saved with the weights."""
    options = {"verbose": 0, "batch_size": 32, "seed": 5, "epochs": 4}
    whole = SparkModel(problem.model(keras.optimizers.Adam(0.01)), num_workers=2)
    whole.fit(problem.x, problem.y, **options)
    first = SparkModel(problem.model(keras.optimizers.Adam(0.01)), num_workers=2)
    first.fit(problem.x, problem.y, **{**options, "epochs": 2})
    first.save(str(tmp_path / "half.keras"))
    second = SparkModel.load(str(tmp_path / "half.keras"))
    second.fit(problem.x, problem.y, initial_epoch=2, **options)

    assert close(second.model, whole.model, 1e-7)


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_gradients_may_be_accumulated(spark, problem, mode):
    """An optimizer with gradient accumulation accumulates on workers, and its count continues."""

    def model():
        return problem.model(keras.optimizers.SGD(0.2, gradient_accumulation_steps=2))

    reference, ours = model(), SparkModel(model(), mode=mode, num_workers=1)
    for _ in range(2):
        reference.fit(problem.x, problem.y, 32, 1, shuffle=False, verbose=0)
        ours.fit(problem.x, problem.y, 32, 1, shuffle=False, verbose=0)

    assert close(ours.model, reference)
    assert int(ours.model.optimizer.iterations) == int(reference.optimizer.iterations) == 7


def test_averages_over_time_end_up_in_the_model(spark, problem):
    """An optimizer with moving averages of weights writes them to the model when training ends."""

    def model():
        return problem.model(keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.5))

    reference, ours = model(), SparkModel(model(), num_workers=2)
    reference.fit(problem.x, problem.y, 32, 2, shuffle=False, verbose=0)
    ours.fit(problem.x, problem.y, 32, 2, shuffle=False, verbose=0)

    assert close(ours.model, reference)


def test_what_a_model_is_made_of_travels_by_itself(spark, problem):
    """Classes, functions and lambdas of the test reach executors with the model without custom_objects."""
    scale = np.float32(0.5)

    class Shift(layers.Layer):
        def call(self, inputs):
            return inputs + scale

    def doubtful(y_true, y_pred):
        return 2 * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    def model():
        keras.utils.set_random_seed(1)
        made = keras.Sequential(
            [
                keras.Input((6,)),
                Shift(),
                layers.Lambda(lambda x: x * scale, output_shape=(6,)),
                layers.Dense(3, lambda x: keras.ops.softmax(x * scale)),
            ]
        )
        made.compile(keras.optimizers.SGD(0.1), doubtful)
        return made

    reference, ours = model(), SparkModel(model(), num_workers=2)
    reference.fit(problem.x, problem.y, 32, 1, shuffle=False, verbose=0)
    ours.fit(problem.x, problem.y, 32, 1, shuffle=False, verbose=0)

    assert close(ours.model, reference)


@pytest.mark.whole
def test_a_layer_that_is_adapted_between_fits_is_adapted_on_workers(spark, problem):
    """A layer that is adapted between fits is adapted on workers too, though they cache compiled models."""
    scale = layers.Normalization()
    model, other = (keras.Sequential([keras.Input((6,)), scale, layers.Dense(3)]) for _ in range(2))
    other.set_weights(model.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    ours = SparkModel(model, num_workers=2)
    for rows in (problem.x * 3 + 1, problem.x - 5):
        scale.adapt(rows)
        other.compile(keras.optimizers.SGD(0.1), loss)  # Keras caches compiled functions as well
        ours.fit(problem.x, problem.y, 32, 1, shuffle=False, verbose=0)
        other.fit(problem.x, problem.y, 32, 1, shuffle=False, verbose=0)

        assert close(model, other)
        expected = other.evaluate(problem.x, problem.y, verbose=0)
        assert ours.evaluate(problem.x, problem.y) == pytest.approx(expected, rel=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize("shape", [(6, 1), (6,)])
def test_a_last_dimension_of_one_may_be_left_out(spark, problem, shape):
    """A last dimension of 1 may be left out in fit, evaluate and predict, as in Keras."""
    model = keras.Sequential([keras.Input((6, 1)), layers.Flatten(), layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    rows = [(x.reshape(shape), y) for x, y in zip(problem.x[:64], problem.y[:64], strict=True)]
    rdd, ours = spark.sparkContext.parallelize(rows, 2), SparkModel(model, num_workers=2)
    ours.fit(rdd, verbose=0)

    x = problem.x[:64, :, None]
    np.testing.assert_allclose(np.stack(ours.predict(rdd).collect()), model.predict(x, verbose=0), atol=1e-6)
    assert ours.evaluate(rdd) == pytest.approx(model.evaluate(x, problem.y[:64], verbose=0), rel=1e-5)


@pytest.mark.whole
def test_rows_that_spark_starts_no_barrier_stage_on_are_trained(spark, problem):
    """A coalesced RDD, which allows no barrier stage, trains without one and in its order."""
    rdd = problem.rdd(spark, 50, 50, 50, 53).coalesce(2)
    history = SparkModel(problem.model(), num_workers=2).fit(rdd, shuffle=False, verbose=0)

    assert (203, 0) == (history.training["rows"], history.training["restarts"])


@pytest.mark.whole
@pytest.mark.parametrize("validation", ["none", "rdd"])
def test_arrays_that_no_task_can_bring_along_are_trained(spark, problem, validation):
    """Arrays too large for a task's message are trained on; the tests' Spark limits messages to 1 MiB."""
    x, y = np.repeat(problem.x, 400, axis=0), np.repeat(problem.y, 400)
    rdd = problem.rdd(spark, 100, 103) if validation == "rdd" else None
    ours = SparkModel(problem.model(), num_workers=2)
    history = ours.fit(x, y, 4096, 1, validation_data=rdd, verbose=0)

    assert len(y) == history.training["rows"]
    assert (validation == "rdd") is ("val_loss" in history.history)
    expected = ours.model.predict(x, 4096, verbose=0)
    np.testing.assert_allclose(ours.predict(x, batch_size=4096), expected, atol=1e-5)
    assert ours.evaluate(x, y, 4096) == pytest.approx(ours.model.evaluate(x, y, 4096, verbose=0), rel=1e-4)


BAD = [
    ({"class_weight": {"a": 1.0}}, ConfigError, "class_weight should be a dict from class index to weight"),
    (
        {"class_weight": {0: 2.0}, "sample_weight": np.ones(203)},
        ConfigError,
        "if rows have sample weights",
    ),
    (
        {"class_weight": {0: 2.0}, "validation_data": (POINTS, LABELS, np.ones((3, 2)))},
        ConfigError,
        r"validation rows should have one sample weight each; got weights of shape \(2,\)",
    ),
    ({"sample_weight": np.ones(7)}, DataError, "sample_weight with 7"),
    ({"steps_per_epoch": 0}, ConfigError, "steps_per_epoch should be a whole number of at least 1; got 0."),
    ({"validation_freq": 0}, ConfigError, "validation_freq should be a whole number of at least 1; got 0."),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD)
def test_what_cannot_be_taken_is_refused_before_any_job(spark, problem, jobs, arguments, kind, message):
    """Invalid weights, epochs and other arguments raise a clear error before any job."""
    before = jobs()

    with pytest.raises(kind, match=message):
        SparkModel(problem.model()).fit(problem.x, problem.y, **arguments)
    assert jobs() == before


def test_inputs_that_the_model_does_not_know_are_named(spark, two):
    """A dict without one of the inputs is refused with the names of both."""
    x = {"words": two.x["words"], "dots": two.x["points"]}

    with pytest.raises(DataError, match="takes inputs 'words', 'points'; x has 'dots', 'words'"):
        SparkModel(two.model()).fit(x, two.y)


@pytest.mark.whole
def test_sparse_vectors_train_as_the_array_does(spark):
    """Sparse vectors in a DataFrame or an RDD, mixed with dense ones, train as the arrays in Keras."""
    from pyspark.ml.linalg import Vectors

    random, size = np.random.default_rng(0), 4096
    x = np.zeros((ROWS, size), np.float32)
    x[np.arange(ROWS)[:, None], random.integers(0, size, (ROWS, 5))] = random.normal(size=(ROWS, 5))
    y = x[:, : size // 2].sum(1)

    def model():
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input((size,)), layers.Dense(1, name="sum")])
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    vectors = [Vectors.sparse(size, {int(i): float(row[i]) for i in np.flatnonzero(row)}) for row in x]
    vectors[7] = Vectors.dense(x[7].tolist())
    pairs = list(zip(vectors, y.tolist(), strict=True))
    frame = spark.createDataFrame(pairs, ["features", "label"]).repartition(2)
    held = spark.createDataFrame([(Vectors.dense(x[0].tolist()), float(y[0]))], ["features", "label"])
    reference = model()
    reference.fit(x, y, ROWS, 3, verbose=0)
    expected = reference.evaluate(x, y, verbose=0)

    for data, options in ((frame, {"validation_data": held}), (spark.sparkContext.parallelize(pairs, 2), {})):
        spark_model = SparkModel(model(), num_workers=2)
        history = spark_model.fit(data, batch_size=ROWS, epochs=3, verbose=0, **options).history
        assert bool(options) == ("val_loss" in history)
        np.testing.assert_allclose(reference.get_weights()[0], spark_model.model.get_weights()[0], atol=1e-6)
        assert spark_model.evaluate(data) == pytest.approx(expected, rel=1e-4)
    found = [row.prediction for row in spark_model.predict(frame.coalesce(1)).collect()]
    assert sorted(found) == pytest.approx(sorted(reference.predict(x, verbose=0)[:, 0]), abs=1e-5)
