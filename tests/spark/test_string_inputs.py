"""Models with string inputs train, evaluate and predict as in plain Keras on TensorFlow.

Other backends refuse them by name, wherever they are given, before any data is read.
"""

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.sql import functions

from sparkdl import SparkModel, predict_udf, to_simple_rdd
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.ml import KerasEstimator, KerasEstimatorModel, KerasTransformer

MASTERS = ("local", "connect")
WORDS = np.array(["good film", "bad film", "good ünd bad", ""] * 8, object)
AGES = np.linspace(-1, 1, 32).astype("float32")
LABELS = np.array([1.0, 0.0, 1.0, 0.0] * 8)
WEIGHTS = np.linspace(0.5, 1.5, 32)
SETTINGS = {"batch_size": 32, "epochs": 2, "verbose": 0}
tensorflow = pytest.mark.backend("tensorflow")
layers = keras.layers


def adapted(layer):
    """Return a layer that has learned its vocabulary from the words."""
    layer.adapt(WORDS.tolist())
    return layer


def vectorization(**settings):
    """Return a layer that turns a text into the numbers of four words."""
    return layers.TextVectorization(output_sequence_length=4, **settings)


LAYERS = {
    "text": lambda: vectorization(vocabulary=["good", "bad", "film"]),
    "adapted text": lambda: adapted(vectorization()),
    "function of text": lambda: adapted(vectorization(standardize=lambda text: keras.ops.copy(text))),
    "lookup": lambda: layers.StringLookup(vocabulary=["good film", "bad film"]),
    "adapted lookup": lambda: adapted(layers.StringLookup(num_oov_indices=2, mask_token="")),
    "hashing": lambda: layers.Hashing(12),
}


def build(kind="adapted text", shape=(1,)):
    """Return a new compiled model with string input, equal at each call."""
    keras.utils.set_random_seed(1)
    words = keras.Input(shape, dtype="string", name="words")
    embedded = layers.Embedding(16, 4)(LAYERS[kind]()(words))
    made = layers.Dense(1, "sigmoid")(layers.Flatten()(embedded))
    return compiled(keras.Model(words, made))


def build_mixed():
    """Return a compiled model with a string and a numeric input."""
    keras.utils.set_random_seed(1)
    words, age = keras.Input((), dtype="string", name="words"), keras.Input((1,), name="age")
    counts = adapted(layers.TextVectorization(output_mode="tf_idf"))(words)
    made = layers.Dense(1, "sigmoid")(layers.concatenate([layers.Dense(3)(counts), age]))
    return compiled(keras.Model({"words": words, "age": age}, made))


def compiled(model):
    """Compile a model and return it."""
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["mae"])
    return model


def tensors(words=WORDS):
    """Return words as tensors, as plain Keras takes them."""
    import tensorflow as tf

    return tf.constant(words.tolist())


@pytest.fixture(scope="module")
def plain():
    """A model trained by plain Keras."""
    model = build()
    model.fit(tensors()[:, None], LABELS, shuffle=False, **SETTINGS)
    return model


@pytest.fixture(scope="module")
def frame(spark):
    """A DataFrame of the words, their bytes, the ages and the labels."""
    table = pd.DataFrame(
        {
            "row": range(32),
            "words": WORDS,
            "raw": [word.encode() for word in WORDS],
            "age": AGES,
            "label": LABELS,
            "weight": WEIGHTS,
        }
    )
    return spark.createDataFrame(table).cache()


def rows_of_a_worker(worker, num_workers):
    """Return a worker's rows as arrays."""
    return WORDS[worker::num_workers], LABELS[worker::num_workers]


def batches_of_a_worker(worker, num_workers):
    """Return a worker's rows as a TensorFlow dataset."""
    import tensorflow as tf

    words, labels = rows_of_a_worker(worker, num_workers)
    return tf.data.Dataset.from_tensor_slices((words.tolist(), labels)).batch(5)


FITS = {
    "strings": lambda fit, frame: fit(frame, features_col="words"),
    "bytes": lambda fit, frame: fit(frame, features_col=["RAW"]),
    "arrays of strings": lambda fit, frame: fit(
        frame.withColumn("words", functions.array("words")), features_col="words"
    ),
    "objects": lambda fit, frame: fit(WORDS, LABELS),
    "unicode": lambda fit, frame: fit(WORDS.astype(str)[:, None], LABELS),
    "array of bytes": lambda fit, frame: fit(np.array([word.encode() for word in WORDS]), LABELS),
    "list": lambda fit, frame: fit(WORDS.tolist(), LABELS),
    "pandas": lambda fit, frame: fit(pd.Series(WORDS, dtype="category"), LABELS),
    "tensor": lambda fit, frame: fit(tensors(), LABELS),
    "rdd": lambda fit, frame: fit(to_simple_rdd(frame.sparkSession.sparkContext, WORDS, LABELS)),
    "rows": lambda fit, frame: fit(rows_of_a_worker),
    "tf.data": lambda fit, frame: fit(batches_of_a_worker),
}
PAIRS = dict.fromkeys(
    [
        ("adapted lookup", "rdd"),
        *(("adapted text", form) for form in FITS),
        *((kind, "strings") for kind in LAYERS),
    ]
)


@pytest.mark.whole
@tensorflow
@pytest.mark.classic
@pytest.mark.parametrize(
    ("kind", "form"),
    PAIRS,
)
def test_strings_train_as_in_keras(frame, kind, form):
    """Strings of every form give the weights that plain Keras's fit gives."""
    model, expected = build(kind), build(kind)
    expected.fit(tensors()[:, None], LABELS, shuffle=False, **SETTINGS)

    FITS[form](
        lambda *data, **columns: SparkModel(model, num_workers=2).fit(*data, **columns, **SETTINGS), frame
    )

    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


MIXED = {
    "arrays": lambda spark_model, frame: spark_model.fit(
        {"words": WORDS, "age": AGES},
        LABELS,
        sample_weight=WEIGHTS,
        validation_data=({"words": WORDS[::-1], "age": AGES}, LABELS),
        **SETTINGS,
    ),
    "columns": lambda spark_model, frame: spark_model.fit(
        frame,
        features_col={"words": "words", "age": "age"},
        sample_weight="weight",
        validation_data=reversed_words(frame),
        **SETTINGS,
    ),
}


def reversed_words(frame):
    """Return the rows with the words in reverse order, without weights."""
    table = pd.DataFrame({"words": WORDS[::-1], "age": AGES, "label": LABELS})
    return frame.sparkSession.createDataFrame(table)


@pytest.mark.whole
@tensorflow
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("arrays", marks=[pytest.mark.classic, pytest.mark.whole]),
        "columns",
    ],
)
def test_strings_beside_numbers_and_weights_train_as_in_keras(frame, form):
    """Weights and History of weighted rows and validation rows are those of plain Keras's fit."""
    model, expected = build_mixed(), build_mixed()
    history = expected.fit(
        {"words": tensors(), "age": AGES},
        LABELS,
        sample_weight=WEIGHTS,
        shuffle=False,
        validation_data=({"words": tensors(WORDS[::-1]), "age": AGES}, LABELS),
        **SETTINGS,
    )

    found = MIXED[form](SparkModel(model, num_workers=2), frame)

    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert found.history.keys() == history.history.keys()
    for name, values in history.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5)


@tensorflow
def test_strings_are_predicted_and_evaluated_from_columns(frame, plain):
    """A DataFrame, SQL functions and a transformer give the predictions of plain Keras."""
    x, rows = tensors()[:, None], frame.orderBy("row")
    expected = plain.predict(x, verbose=0)[:, 0]

    for found in (
        SparkModel(plain).predict(rows, features_col=["WORDS"]).select("prediction"),
        rows.select(predict_udf(plain)("raw")),
        rows.select(predict_udf(plain)(functions.array("words"))),
        KerasTransformer(model=plain, featuresCol="words", task="regression")
        .transform(rows)
        .select("prediction"),
    ):
        np.testing.assert_allclose([row[0] for row in found.collect()], expected, atol=1e-6)
    result = SparkModel(plain).evaluate(frame, features_col="words")
    np.testing.assert_allclose(result, plain.evaluate(x, LABELS, verbose=0), rtol=1e-5)


@pytest.mark.whole
@tensorflow
@pytest.mark.classic
def test_strings_are_predicted_and_evaluated_from_arrays_and_rdds(spark, plain):
    """Arrays and RDDs, with partitions that have no rows, give the predictions of plain Keras."""
    x, model = tensors()[:, None], SparkModel(plain)
    expected = plain.predict(x, verbose=0)

    for given in (WORDS, WORDS.astype(str)[:, None]):
        np.testing.assert_allclose(model.predict(given), expected, atol=1e-6)
    pairs = list(zip(WORDS.tolist(), LABELS.tolist(), strict=True))
    rdd = spark.sparkContext.parallelize(pairs, 2).union(spark.sparkContext.parallelize([], 1))
    np.testing.assert_allclose(model.predict(rdd).collect(), expected, atol=1e-6)
    for data in ((WORDS, LABELS), (rdd,)):
        np.testing.assert_allclose(model.evaluate(*data), plain.evaluate(x, LABELS, verbose=0), rtol=1e-5)
    for none in ([], WORDS[:0], WORDS[:0].astype(str)[:, None]):
        assert model.predict(none).shape == (0, 1)


@tensorflow
@pytest.mark.classic
def test_rows_of_several_strings_are_predicted(spark):
    """Rows of two strings may be an array, an array column, or two columns."""
    model = build("lookup", (2,))
    pairs = np.stack([WORDS, WORDS[::-1]], axis=1)
    rows = spark.createDataFrame(pd.DataFrame(pairs, columns=["a", "b"]))
    expected = model.predict(tensors(pairs), verbose=0)

    np.testing.assert_allclose(SparkModel(model).predict(pairs), expected, atol=1e-6)
    np.testing.assert_allclose(SparkModel(model).predict(pairs.astype(str)), expected, atol=1e-6)
    for found in (
        SparkModel(model).predict(rows, features_col=["a", "b"]).select("prediction"),
        rows.select(predict_udf(model)("a", "b")),
        rows.select(predict_udf(model)(functions.array("a", "b"))),
    ):
        np.testing.assert_allclose([row[0] for row in found.collect()], expected[:, 0], atol=1e-6)


@pytest.mark.whole
@tensorflow
def test_a_stage_is_saved_with_its_vocabulary(frame, tmp_path):
    """A fitted stage with an adapted vocabulary predicts the same after it is saved and loaded."""
    fitted = KerasEstimator(model=build_mixed(), featuresCol={"words": "words", "age": "age"}).fit(frame)
    fitted.write().save(str(tmp_path / "stage"))

    loaded = KerasEstimatorModel.load(str(tmp_path / "stage"))

    expected, found = (
        [row.probability.toArray() for row in stage.transform(frame.orderBy("row")).collect()]
        for stage in (fitted, loaded)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)
    plain = fitted.getModel().predict({"words": tensors(), "age": AGES}, verbose=0)
    np.testing.assert_allclose(np.stack(found)[:, 1:], plain, atol=1e-6)


@tensorflow
def test_columns_of_another_kind_are_refused_by_name(frame, jobs):
    """Strings for numbers, numbers for strings, and strings as labels raise a ConfigError before any job."""
    texts, mixed, numbers = build(), build_mixed(), keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    numbers.compile("sgd", "mse")
    before = jobs()

    for message, call in {
        "column 'words' to hold numbers": lambda: SparkModel(numbers).fit(frame, features_col="words"),
        "'words' to hold numbers.*": lambda: SparkModel(texts).fit(
            frame, features_col="words", label_col="words"
        ),
        "'raw' to hold numbers": lambda: SparkModel(mixed).predict(
            frame, features_col={"words": "words", "age": "raw"}
        ),
        "column 'age' to hold strings; it holds float": lambda: SparkModel(texts).predict(
            frame, features_col="age"
        ),
        "got strings in words, but not in all of words, age": lambda: SparkModel(texts).fit(
            frame, features_col=["words", "age"]
        ),
    }.items():
        with pytest.raises(ConfigError, match=message):
            call()
    assert jobs() == before


@tensorflow
@pytest.mark.classic
def test_arrays_of_another_kind_are_refused_by_name(spark, jobs):
    """Strings for numbers, numbers for strings, and strings as labels raise a DataError before any job."""
    texts, numbers = SparkModel(build()), keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    numbers.compile("sgd", "mse")
    before = jobs()

    with pytest.raises(DataError, match='Expected x to be strings for the input "words".*has numbers'):
        texts.fit(AGES, LABELS, verbose=0)
    with pytest.raises(DataError, match="Expected x to be numbers for the input .*has strings"):
        SparkModel(numbers).fit(WORDS, LABELS, verbose=0)
    with pytest.raises(DataError, match="Expected y to be numbers; the first row has strings"):
        texts.fit(WORDS, WORDS, verbose=0)
    with pytest.raises(DataError, match="Expected x to hold strings; row 1 has 'None'"):
        texts.predict(np.array(["good", None], object))
    assert jobs() == before


@tensorflow
def test_strings_as_predictions_are_for_arrays(frame, jobs):
    """A model with string outputs predicts arrays; columns of its predictions are refused by name."""
    words = keras.Input((1,), dtype="string", name="words")
    layer = layers.StringLookup(vocabulary=["good film", "bad film"])
    back = layers.StringLookup(vocabulary=layer.get_vocabulary(), invert=True)
    model = keras.Model(words, back(layer(words)))
    before = jobs()

    for call in (
        lambda: predict_udf(model),
        lambda: KerasTransformer(model=model, featuresCol="words", task="regression").transform(frame),
    ):
        with pytest.raises(ModelError, match="An output of the model .* returns strings"):
            call()
    assert jobs() == before


@pytest.mark.whole
@tensorflow
def test_nulls_among_strings_are_named(frame):
    """A null raises a DataError that names the column and the row."""
    row = functions.col("row")
    missing = frame.withColumn("words", functions.when(row != 7, functions.col("words")))

    with pytest.raises(Exception, match="Expected no nulls in words; row . of a batch is null"):
        SparkModel(build("text")).predict(missing, features_col="words").collect()
    with pytest.raises(DataError, match="Expected no nulls in words; row .* is null"):
        SparkModel(build("text")).evaluate(missing, features_col="words")


DOORS = {
    "fit": lambda model, frame: SparkModel(model).fit(frame, features_col="words"),
    "evaluate": lambda model, frame: SparkModel(model).evaluate(frame, features_col="words"),
    "predict": lambda model, frame: SparkModel(model).predict(frame, features_col="words"),
    "predict_udf": lambda model, frame: predict_udf(model),
    "KerasEstimator": lambda model, frame: KerasEstimator(model=model, featuresCol="words").fit(frame),
    "KerasTransformer": lambda model, frame: KerasTransformer(model=model, featuresCol="words").transform(
        frame
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.backend(name)) for name in ("jax", "torch")]
)
def test_strings_are_refused_on_other_backends(spark, jobs, door, backend):
    """Every entry point raises the same ModelError on other backends and runs no job."""
    words = keras.Input((1,), dtype="string", name="words")
    model = keras.Model(words, layers.Lambda(lambda x: x, output_shape=(1,))(words))
    model.compile("sgd", "mse")
    frame = spark.createDataFrame([("good film", 1.0)], "words string, label double")
    before = jobs()

    with pytest.raises(
        ModelError, match=f'The input "words" of .* need the TensorFlow backend; got {backend}'
    ):
        DOORS[door](model, frame)
    assert jobs() == before
