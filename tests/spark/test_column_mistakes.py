"""Mistakes in the columns of a DataFrame end in an error before a job runs, or make no difference."""

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions

from sparkdl import SparkModel
from sparkdl.errors import ConfigError
from sparkdl.ml import KerasEstimator, KerasTransformer

ROWS = np.random.default_rng(4).normal(size=(24, 4)).astype("float32")


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(*map(float, row), row.tolist(), row.tobytes(), float(row[0] > 0)) for row in ROWS]
    kinds = "a double, b double, c double, d double, list array<float>, bytes binary, label double"
    return spark.createDataFrame(rows, kinds).cache()


def model_of(*shapes, loss="mse"):
    inputs = [keras.Input(shape, name=f"in_{place}") for place, shape in enumerate(shapes)]
    flat = [keras.layers.Flatten()(each) for each in inputs]
    wide = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    model = keras.Model(inputs if len(inputs) > 1 else inputs[0], keras.layers.Dense(1)(wide))
    model.compile("sgd", loss)
    return model


def from_bytes(value):
    return np.frombuffer(value, "float32")


@pytest.mark.parametrize(
    ("columns", "decode", "named"),
    [
        ("bytes", {"bytes": from_bytes, "byts": from_bytes}, "byts"),
        ("list", {"bytes": from_bytes}, "bytes"),
        (["a", "b", "c", "d"], {"a": from_bytes}, "'a'"),
        ("list", {"`list`": from_bytes}, "`list`"),
    ],
)
def test_a_function_for_a_column_that_is_not_read_alone_is_refused(
    spark, frame, jobs, columns, decode, named
):
    """Every function of decode must be for a column of its own that is read, in predictions too."""
    model = model_of((4,))
    calls = [
        lambda: SparkModel(model).predict(frame, features_col=columns, decode=decode),
        lambda: KerasTransformer(model=model, featuresCol=columns, decode=decode).transform(frame),
    ]
    before = jobs()
    for call in calls:
        with pytest.raises(ConfigError, match=f"decode has functions for .*{named}"):
            call()
    assert before == jobs()


def test_a_fitted_model_keeps_a_function_for_the_column_of_labels(spark, frame):
    """A model of an estimator predicts where the labels that it decoded in training are missing."""
    labelled = frame.withColumn("answer", functions.concat(functions.lit("="), functions.col("label")))
    decode = {"bytes": from_bytes, "answer": lambda text: np.float32(text[1:])}
    estimator = KerasEstimator(
        model=model_of((4,)), featuresCol="bytes", labelCol="answer", decode=decode, epochs=1, numWorkers=1
    )

    assert 24 == len(estimator.fit(labelled).transform(frame.select("bytes")).collect())


@pytest.mark.parametrize(
    ("columns", "shape"),
    [(["a", "b", "c"], (4,)), ("a", (4,)), (["a", "b", "c", "d"], (3,)), (["a", "b", "c"], (2, 2))],
)
def test_a_wrong_number_of_columns_is_refused_before_a_prediction(spark, frame, jobs, columns, shape):
    """Columns of numbers must be as many as the numbers that an input takes."""
    model, before = model_of(shape), jobs()
    for call in (
        lambda: SparkModel(model).predict(frame, features_col=columns),
        lambda: KerasTransformer(model=model, featuresCol=columns).transform(frame),
    ):
        with pytest.raises(ConfigError, match="takes rows of shape .*columns? .* shape"):
            call()
    assert before == jobs()


@pytest.mark.parametrize(("columns", "shape"), [(["a", "b", "c", "d"], (2, 2)), ("a", ()), ("a", (1,))])
def test_as_many_columns_as_numbers_are_predicted(spark, frame, columns, shape):
    """Columns of numbers are reshaped for the input."""
    model = model_of(shape) if shape else None
    if model is None:
        inputs = keras.Input(())
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.expand_dims(inputs, -1)))
    predicted = KerasTransformer(model=model, featuresCol=columns).transform(frame).collect()

    width = len(columns) if isinstance(columns, list) else 1
    expected = model.predict(ROWS[:, :width].reshape(-1, *shape), verbose=0).ravel()
    np.testing.assert_allclose([row.prediction for row in predicted], expected, rtol=1e-5, atol=1e-6)


def test_two_columns_for_one_input_are_refused(spark, frame, jobs):
    """A dict that gives an input two columns is refused, for features and for labels."""
    model, before = model_of((4,)), jobs()
    with pytest.raises(ConfigError, match="'a', 'b' .*input 'in_0'"):
        KerasTransformer(model=model, featuresCol={"a": "in_0", "b": "in_0"}).transform(frame)
    name = model.output_names[0]
    estimator = KerasEstimator(model=model, featuresCol="list", labelCol={"label": name, "a": name})
    with pytest.raises(ConfigError, match=f"'label', 'a' .*output '{name}'"):
        estimator.fit(frame)
    assert before == jobs()


def test_labels_by_name_have_the_shape_of_their_output(spark, frame):
    """Outputs in a dict are matched to labels by name, whatever the order of the names."""
    inputs = keras.Input((4,))
    outputs = {
        "z": keras.layers.Dense(1)(inputs),
        "a": keras.layers.Reshape((2, 2))(keras.layers.Dense(4)(inputs)),
    }
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"z": "mse", "a": "mse"})
    history = SparkModel(model, num_workers=1).fit(
        frame, features_col="list", label_col={"z": "label", "a": "list"}, verbose=0, epochs=1
    )

    assert np.isfinite(history.history["loss"][0])


def test_validation_rows_without_weights_count_once_each(spark, frame):
    """Training rows have a weight for each time step; validation rows without weights get ones."""
    inputs = keras.Input((4,))
    outputs = keras.layers.Reshape((4, 1))(keras.layers.Dense(4)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", weighted_metrics=["mse"])
    weight, y = (
        functions.array(*[functions.lit(2.0)] * 4),
        functions.transform("list", lambda value: functions.array(value)),
    )
    rows = frame.withColumn("weight", weight).withColumn("y", y)
    history = SparkModel(model, num_workers=2).fit(
        rows,
        features_col="list",
        label_col="y",
        sample_weight="weight",
        validation_data=rows.drop("weight"),
        verbose=0,
        epochs=1,
        batch_size=24,
    )

    y = ROWS[..., None]
    expected = model.evaluate(ROWS, y, verbose=0, return_dict=True)
    assert expected["loss"] == pytest.approx(history.history["val_loss"][0], rel=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("ours", "theirs"), [("boolean", "int"), ("int", "boolean"), ("tinyint", "double"), ("boolean", "float")]
)
def test_validation_labels_may_be_of_another_type(spark, frame, ours, theirs):
    """Labels of 0 and 1 are the same numbers as booleans, integers and floats."""
    rows, held = (frame.withColumn("label", functions.col("label").cast(kind)) for kind in (ours, theirs))
    model = model_of((4,), loss="binary_crossentropy")
    history = SparkModel(model, num_workers=2).fit(
        rows, features_col="list", validation_data=held, verbose=0, epochs=1
    )

    expected = model.evaluate(ROWS, (ROWS[:, 0] > 0).astype("float32")[:, None], verbose=0)
    assert expected == pytest.approx(history.history["val_loss"][0], rel=1e-4)


def test_validation_rows_with_some_of_the_weights_are_refused(spark, frame, jobs):
    """Validation rows have a weight for every output, or no weights."""
    inputs = keras.Input((4,))
    model = keras.Model(
        inputs, [keras.layers.Dense(1, name="p")(inputs), keras.layers.Dense(1, name="q")(inputs)]
    )
    model.compile("sgd", "mse")
    rows = frame.withColumn("w1", functions.lit(1.0)).withColumn("w2", functions.lit(2.0))
    before = jobs()
    with pytest.raises(ConfigError, match="validation_data .*'w1', 'w2'.*lacks 'w2'"):
        SparkModel(model).fit(
            rows,
            features_col="list",
            label_col=["label", "a"],
            sample_weight=["w1", "w2"],
            validation_data=rows.drop("w2"),
        )
    assert before == jobs()


@pytest.mark.parametrize("first", ["label", "features"])
def test_rows_of_features_and_a_label_are_read_by_name(spark, frame, first):
    """Rows of an RDD that were rows of a DataFrame with features and a label need no order."""
    named = frame.select(functions.col("list").alias("features"), "label")
    rows = named.select(first, *[name for name in named.columns if name != first]).rdd
    model = model_of((4,))
    spark_model = SparkModel(model, num_workers=1)
    spark_model.fit(rows, verbose=0, epochs=1, shuffle=False)

    expected = model.evaluate(ROWS, (ROWS[:, 0] > 0).astype("float32")[:, None], verbose=0)
    assert expected == pytest.approx(spark_model.evaluate(rows, verbose=0), rel=1e-5)
    np.testing.assert_allclose(
        spark_model.predict(rows).collect(), model.predict(ROWS, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_vectors_keep_all_digits_under_float64(spark):
    """With 64-bit floats in Keras, vectors are read with 64 bits, as arrays are."""
    values = [float(100_000_000 + number) for number in range(1, 17)]  # with 32 bits, multiples of 8
    rows = [(Vectors.dense([value]), [value], 0.0) for value in values]
    frame = spark.createDataFrame(rows, ["vector", "list", "label"]).coalesce(1)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0, offset=-100_000_000.0)])
        model.compile(loss="mse")
        losses = [SparkModel(model).evaluate(frame, features_col=name) for name in ("vector", "list")]
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")

    assert [sum(number**2 for number in range(1, 17)) / 16] * 2 == losses
