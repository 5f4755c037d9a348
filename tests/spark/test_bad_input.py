"""Invalid input is refused before it costs anything, with an error that names the remedy."""

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from sparkdl import SparkModel
from sparkdl.errors import ClusterError, ConfigError, DataError, ModelError, SparkDLError


def uncompiled(problem):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


class Unknown(keras.layers.Layer):
    """A layer that cannot be deserialized: its constructor argument is not a plain value."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def call(self, inputs):
        return inputs


POINT = np.zeros(6, "float32")


class Sequence(keras.utils.PyDataset):
    def __getitem__(self, index):
        return np.zeros((2, 6)), np.zeros(2)

    def __len__(self):
        return 2


SETTINGS = [
    ({"mode": "sometimes"}, ConfigError, "mode should be one of 'synchronous', 'asynchronous', 'hogwild'"),
    (
        {"frequency": "often"},
        ConfigError,
        'frequency should be "batch", "epoch", "auto" or a whole number of batches',
    ),
    ({"frequency": 0}, ConfigError, r"at least 1\); got 0\."),
    ({"merge": "vote"}, ConfigError, "vote"),
    ({"num_workers": 0}, ConfigError, "num_workers should be a whole number of at least 1; got 0."),
    ({"network": 7100}, ConfigError, "network should be a sparkdl.Network; got 7100."),
    ({"parameter_server_mode": "socket"}, ConfigError, 'parameter_server_mode should be "http"'),
    ({"colour": "red"}, TypeError, "colour"),
]
ARGUMENTS = [
    ({"batch_size": 0}, ConfigError, "batch_size should be a whole number of at least 1; got 0."),
    ({"epochs": -1}, ConfigError, "epochs should be a whole number of at least 0; got -1."),
    ({"verbose": 3}, ConfigError, "verbose should be"),
    (
        {"validation_split": 1.5},
        ConfigError,
        "validation_split should be a number of at least 0 and below 1; got 1.5.",
    ),
    ({"validation_steps": 0}, ConfigError, "validation_steps should be a whole number of at least 1; got 0"),
    ({"callbacks": [keras.callbacks.TensorBoard(profile_batch=2)]}, ConfigError, "executors train"),
    ({"callbacks": ["early"]}, ConfigError, "callbacks should be keras.callbacks.Callback objects; got str."),
    ({"colour": "red"}, TypeError, "colour"),
]


@pytest.fixture
def no_job(jobs):
    """Assert after the test that it ran no Spark job."""
    before = jobs()
    yield
    assert jobs() == before


@pytest.mark.parametrize(("settings", "kind", "message"), SETTINGS)
def test_settings_are_checked_when_they_are_given(problem, no_job, settings, kind, message):
    """SparkModel rejects an unknown mode, frequency, rule or argument by name."""
    with pytest.raises(kind, match=message):
        SparkModel(problem.model(), **settings)


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS)
def test_arguments_of_fit_are_checked_before_any_job(problem, no_job, arguments, kind, message):
    """An argument that fit cannot honour is refused by name, before any job."""
    with pytest.raises(kind, match=message):
        SparkModel(problem.model()).fit(problem.x, problem.y, **arguments)


def test_a_model_has_to_be_a_compiled_keras_model(no_job):
    """SparkModel rejects an uncompiled model, and an argument that is not a model, on construction."""
    with pytest.raises(ModelError, match=r"is not compiled. Call model.compile\(optimizer=..., loss=...\)"):
        SparkModel(uncompiled(None))
    with pytest.raises(ModelError, match="compiled keras.Model or a function .* got str"):
        SparkModel("model.keras")


def test_a_layer_that_cannot_be_made_again_is_named(spark, problem, no_job):
    """A layer that cannot be deserialized is named by the driver, before any job."""
    model = keras.Sequential(
        [keras.Input((6,)), Unknown(object()), keras.layers.Dense(3, activation="softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")

    for data in ((problem.x, problem.y), (spark.sparkContext.parallelize([(POINT, 1)]),)):
        with pytest.raises(ModelError, match="Unknown"):
            SparkModel(model, num_workers=2).fit(*data)


@pytest.mark.parametrize("built", [True, False])
def test_a_model_without_trainable_variables_is_refused(problem, no_job, built):
    """A model without trainable variables is refused before any job, built or not."""
    first = [keras.Input((6,))] if built else []
    model = keras.Sequential([*first, keras.layers.Dense(3, activation="softmax", trainable=False)])
    model.compile("sgd", "sparse_categorical_crossentropy")

    with pytest.raises(ModelError, match="has no trainable variables, so fit has nothing to train"):
        SparkModel(model, num_workers=2).fit(problem.x, problem.y)


def test_arrays_are_checked_before_any_job(problem, no_job):
    """Lengths, shapes, types and row counts of arrays are checked without a job."""
    x, y, fit = problem.x, problem.y, SparkModel(problem.model(), num_workers=2).fit
    cases = [
        ((x, y[:-1]), DataError, "x and y should have equal numbers of rows; got x with 203, y with 202."),
        ((x[:, :5], y), DataError, r"takes rows of shape \(6,\); x has rows of shape \(5,\)"),
        ((x.astype(str), y), DataError, "Expected x to be numbers for the input .*has strings"),
        ((x[:0], y[:0]), DataError, "There are no rows"),
        ((x, None), ConfigError, "y should be passed"),
        ((None, None), ConfigError, "x should be NumPy arrays or pandas with y"),
        ((pd.DataFrame(x), y.astype(object).astype(str)), DataError, "Expected y to be numbers"),
        ((pd.DataFrame(x), pd.Series(list("ab" * 101 + "a"))), DataError, "Expected y to be numbers"),
        ((Sequence(), None), ConfigError, "Pass arrays; or, for fit"),
        ((tf.data.Dataset.from_tensors((x, y)), None), ConfigError, "Pass arrays; or, for fit"),
        ((((x, y) for _ in range(2)), None), ConfigError, "tf.data datasets, generators and torch loaders"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            fit(*arguments)


def test_validation_data_are_checked_before_any_job(spark, problem, no_job):
    """Validation rows must match the training rows, and only one way to specify them is allowed."""
    x, y, fit = problem.x, problem.y, SparkModel(problem.model(), num_workers=2).fit
    frame = spark.createDataFrame([([1.0] * 6, 1)], ["features", "label"])
    cases = [
        ({"validation_data": frame}, ConfigError, "should be arrays .* or an RDD .* got a DataFrame"),
        (
            {"validation_data": (x, y, y, y)},
            ConfigError,
            "validation_data should be .*; got a tuple of length 4",
        ),
        ({"validation_data": (x[:, :2], y)}, DataError, r"takes rows of shape \(6,\); x has rows of shape"),
        ({"validation_split": 0.999}, DataError, "both parts need at least one row"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            fit(x, y, **arguments)


def test_more_workers_than_slots_are_refused(spark, problem, no_job):
    """The error states the number of available slots, and no row is read."""
    for data in ((problem.x, problem.y), (spark.sparkContext.parallelize([(POINT, 1)]),)):
        with pytest.raises(ClusterError, match="num_workers=3 needs 3 slots; the application has 2"):
            SparkModel(problem.model(), num_workers=3).fit(*data)


def test_columns_of_a_frame_are_checked_before_any_job(problem, frames, no_job):
    """The error for a missing or mistyped column names it and the columns that the DataFrame has."""
    fit = SparkModel(problem.model(), num_workers=2).fit
    frame = frames["array"].selectExpr("features", "label", "cast(label as string) as name")
    cases = [
        ({"label_col": "target"}, "Expected a column 'target'; the DataFrame has features, label, name."),
        ({"label_col": "name"}, "Expected column 'name' to hold numbers, .* it holds string."),
        ({"y": problem.y}, "y should be left out if x is an RDD or a DataFrame"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            fit(frame, **arguments)


@pytest.mark.whole
def test_one_row_is_looked_at_before_anything_else(spark, problem, frames, jobs):
    """A first row with a wrong shape or type, or no first row, stops a fit of an RDD or DataFrame at once."""
    context, fit = spark.sparkContext, SparkModel(problem.model(), num_workers=2).fit
    cases = [
        (context.parallelize([], 2), "There are no rows: the RDD is empty."),
        (context.parallelize([1.0, 2.0]), "Expected an RDD of tuples"),
        (context.parallelize([(np.zeros(5), 1)]), r"takes rows of shape \(6,\); x has rows of shape \(5,\)"),
        (context.parallelize([("six", 1)]), "Expected x to be numbers"),
        (context.parallelize([([[1], [1, 2]], 1)]), "Expected x to be numbers, or arrays of equal shape"),
        (frames["array"].selectExpr("array(1, null) as features", "label"), "without nulls; the first row"),
        (frames["array"].filter("row < 0"), "There are no rows: the DataFrame is empty."),
        (frames["array"].selectExpr("slice(features, 1, 5) as features", "label"), r"of shape \(5,\)"),
        (frames["array"].selectExpr("features", "cast(null as int) as label"), "Expected no nulls in label"),
    ]
    for data, message in cases:
        before = jobs()
        with pytest.raises(DataError, match=message):
            fit(data)
        names = [spark.sparkContext.statusTracker().getJobInfo(job).stageIds for job in jobs()[len(before) :]]
        assert sum(len(stages) for stages in names) <= 2  # a look at one partition, then at the other


def bad_rdd(spark, problem, row):
    """Return an RDD of the problem in two partitions, with row 36 of partition 1 replaced."""
    pairs = list(zip(problem.x, problem.y, strict=True))
    pairs[136] = row
    parts = [pairs[:100], pairs[100:]]
    return spark.sparkContext.parallelize(parts, 2).flatMap(lambda part: part)


def refused(spark_model, data, kind, **arguments):
    """Return the error of a fit that stops in the first pass, before any update."""
    start = spark_model.model.get_weights()
    with pytest.raises(kind) as caught:
        spark_model.fit(data, verbose=0, **arguments)
    assert all(np.array_equal(a, b) for a, b in zip(start, spark_model.model.get_weights(), strict=True))
    assert spark_model.history.history == {}
    assert spark_model.history.training["exchanges"] == 0
    assert spark_model.history.training["restarts"] == 0
    return str(caught.value)


ROWS = {
    "shape": ((POINT[:5], 1), "Expected x of shape (6,); row 36 of partition 1 has shape (5,)."),
    "text": ((POINT, "one"), "Expected y to be numbers (int64); row 36 of partition 1 has ['one']."),
    "fraction": ((POINT, 0.5), "fit int64, as in the first row; row 36 of partition 1 has 0.5."),
    "none": ((None, 1), "row 36 of partition 1 has None."),
    "triple": ((POINT, 1, 1), "Expected a tuple (x, y); row 36 of partition 1 is "),
}


@pytest.mark.one_case
@pytest.mark.parametrize(("row", "shuffle"), [("shape", False), *((row, True) for row in ROWS)])
def test_a_bad_row_stops_the_first_pass(spark, problem, row, shuffle):
    """A bad row is reported with its partition, and nothing is trained."""
    bad, message = ROWS[row]
    spark_model = SparkModel(problem.model(), num_workers=2)

    error = refused(spark_model, bad_rdd(spark, problem, bad), DataError, shuffle=shuffle)

    assert message in error


@pytest.mark.whole
def test_a_bad_row_of_a_frame_stops_the_first_pass(spark, problem):
    """A null inside an array is reported with the row and the partition of the DataFrame."""
    rows = [(x.tolist(), int(y)) for x, y in zip(problem.x, problem.y, strict=True)]
    rows[101 + 36][0][2] = None  # two partitions: 101 rows, then 102
    frame = spark.createDataFrame(rows, "features array<float>, label bigint")
    spark_model = SparkModel(problem.model(), num_workers=2)

    error = refused(spark_model, frame, DataError)

    assert "Expected no nulls in features; row 36 of partition 1 is null or contains one." in error


@pytest.mark.whole
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_exception_in_the_users_own_rdd_is_raised_once(spark, problem, shuffle):
    """An exception in the user's RDD reaches the driver with its traceback and is not retried."""
    marked = problem.x[150, 0]

    def broken(pair):
        if pair[0][0] == marked:
            raise LookupError("no such picture")
        return pair

    rdd = problem.rdd(spark, 100, 103).map(broken)

    error = refused(SparkModel(problem.model(), num_workers=2), rdd, DataError, shuffle=shuffle)

    assert "no such picture" in error
    assert "in broken" in error


def test_an_expression_of_the_users_own_that_fails_is_raised_once(spark, problem, frames):
    """A SQL expression that fails in the JVM is reported once and is not retried."""
    label = "case when row = 150 then cast(raise_error('no such label') as int) else label end as label"
    frame = frames["array"].selectExpr("features", label)

    error = refused(SparkModel(problem.model(), num_workers=2), frame, DataError)

    assert "Spark could not compute the rows: " in error
    assert "no such label" in error


@pytest.mark.whole
def test_a_split_that_holds_out_no_row_is_refused(spark, problem):
    """A validation_split that holds out no row is refused: there would be no rows to validate on."""
    rdd = problem.rdd(spark, 100, 103)

    error = refused(SparkModel(problem.model(), num_workers=2), rdd, DataError, validation_split=1e-6)

    assert "holds out none of the 203 rows" in error


def test_evaluate_and_predict_refuse_what_fit_refuses(spark, problem):
    """Calling evaluate or predict with a bad row raises DataError, as fit does."""
    spark_model = SparkModel(problem.model(), num_workers=2)
    rdd = bad_rdd(spark, problem, (np.zeros(5, "float32"), 1))

    with pytest.raises(DataError, match=r"Expected x of shape \(6,\); row 36 of partition 1 has shape"):
        spark_model.evaluate(rdd)
    with pytest.raises(DataError, match=r"takes rows of shape \(6,\); x has rows of shape \(5,\)"):
        spark_model.predict(problem.x[:, :5])


def test_every_refusal_is_of_one_family():
    """All refusals are subclasses of SparkDLError, and most are ValueError too."""
    assert all(issubclass(kind, SparkDLError) for kind in (ClusterError, ConfigError, DataError, ModelError))
    assert all(issubclass(kind, ValueError) for kind in (ConfigError, DataError, ModelError))
