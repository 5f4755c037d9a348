"""The stages work in a pipeline as Spark's own: Params, fit, transform, save and load, model selection."""

import collections
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import HashingTF, StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.ml import KerasEstimator, KerasEstimatorModel, KerasTransformer
from sparkdl.ml.persistence import CUSTOM
from sparkdl.rules import DiLoCo, Rule
from sparkdl.sources.dataframe import frame_source

MASTERS = ("local", "local-cluster", "standalone", "connect")
NAMES = list("abcdef")
# Spark's model selection leaves its thread pool to the garbage collector
leaves_its_pool = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Pool.__del__:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def estimator(problem):
    """An Estimator of the problem's network with two workers."""
    model = problem.model(keras.optimizers.Adam(0.02))
    return KerasEstimator(model=model, numWorkers=2, batchSize=16, epochs=2, seed=1)


@pytest.fixture(scope="session")
def table(spark, problem):
    """The problem's rows with features as scalars, a vector, a sparse vector and an array."""
    rows = [
        (row, *map(float, x), float(y), Vectors.dense(x), sparse_of(x), x.tolist(), row % 5 == 0)
        for row, (x, y) in enumerate(zip(problem.x, problem.y, strict=True))
    ]
    names = ["row", *NAMES, "label", "features", "sparse", "array", "held"]
    return spark.createDataFrame(rows, names).repartition(3, "row").cache()


def sparse_of(x):
    return SparseVector(len(x), list(enumerate(map(float, x))))


def weights_of(fitted):
    return np.concatenate([w.ravel() for w in fitted.getModel().get_weights()])


@pytest.mark.whole
def test_a_fit_is_that_of_a_spark_model_and_leaves_the_given_model(spark, estimator, table):
    """The estimator fits the weights of SparkModel; its own model is untouched."""
    given = estimator.getModel()
    before = given.get_weights()
    alike = keras.models.clone_model(given)
    alike.compile(keras.optimizers.Adam(0.02), given.loss, metrics=["accuracy"])
    alike.set_weights(before)

    fitted = estimator.fit(table)

    SparkModel(alike, num_workers=2).fit(table, batch_size=16, epochs=2, seed=1, verbose=0)
    np.testing.assert_allclose(
        np.concatenate([w.ravel() for w in alike.get_weights()]), weights_of(fitted), atol=1e-6
    )
    assert all(np.array_equal(a, b) for a, b in zip(before, given.get_weights(), strict=True))
    assert estimator.uid == fitted.uid
    assert fitted.hasSummary
    assert 2 == fitted.summary.totalIterations
    assert fitted.summary.history["loss"] == fitted.summary.objectiveHistory
    assert 203 == fitted.summary.training["rows"]


def test_classification_predicts_classes_probabilities_and_raw_predictions(
    spark, problem, estimator, table, caplog
):
    """A fitted model keeps rows and columns, and Spark's evaluators accept the columns it adds and logs."""
    with caplog.at_level(logging.INFO, "sparkdl.ml.estimator"):
        fitted = estimator.fit(table)
    said = f"{estimator.uid} predicts class indices, probabilities and raw predictions, as its loss implies."
    assert said in caplog.messages

    out = fitted.transform(table)

    assert [*table.columns, "rawPrediction", "probability", "prediction"] == out.columns
    rows = sorted(out.collect(), key=lambda row: row.row)
    expected = fitted.getModel().predict(problem.x, verbose=0)
    np.testing.assert_allclose(expected, [row.probability.toArray() for row in rows], atol=1e-5)
    assert expected.argmax(axis=1).tolist() == [int(row.prediction) for row in rows]
    assert {DenseVector} == {type(row.rawPrediction) for row in rows}
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(out)
    assert accuracy == pytest.approx(np.mean(expected.argmax(axis=1) == problem.y))
    loss = MulticlassClassificationEvaluator(metricName="logLoss").evaluate(out)
    assert loss == pytest.approx(fitted.getModel().evaluate(problem.x, problem.y, verbose=0)[0], rel=1e-3)


@pytest.mark.whole
def test_a_sigmoid_tells_two_classes_apart(spark, problem, table):
    """One sigmoid unit gives two probabilities, and raw predictions for BinaryClassificationEvaluator."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
    two = table.withColumn("label", (functions.col("a") > 0).cast("double"))

    out = KerasEstimator(model=model, epochs=3, numWorkers=2, seed=1).fit(two).transform(two)

    assert BinaryClassificationEvaluator().evaluate(out) > 0.9
    first = out.orderBy("row").first()
    assert (2, 2) == (len(first.probability), len(first.rawPrediction))
    assert first.rawPrediction[1] == pytest.approx(-first.rawPrediction[0])


@pytest.mark.whole
def test_a_model_without_a_last_dimension_tells_two_classes_apart(spark, problem, table):
    """An output of one number per row without a last dimension classifies like one of shape (1,)."""
    inputs = keras.Input((6,))
    one = keras.layers.Dense(1, "sigmoid")(inputs)
    flat = keras.Model(inputs, keras.ops.squeeze(one, -1))
    found = []
    for model in (keras.Model(inputs, one), flat):
        model.compile("sgd", "binary_crossentropy")
        made = KerasTransformer(model=model).transform(table)
        kinds = dict(made.select("prediction", "probability", "rawPrediction").dtypes)
        found.append((kinds, sorted(row.prediction for row in made.collect())))
    flat.compile("sgd", "mse")

    assert found[0] == found[1]
    assert "double" == dict(KerasTransformer(model=flat).transform(table).dtypes)["prediction"]


@pytest.mark.whole
def test_empty_names_of_columns_are_none(spark, problem, estimator, table):
    """As in Spark, an empty weightCol or validationIndicatorCol stands for no such column."""
    settings = {"weightCol": "", "validationIndicatorCol": ""}

    assert 1 == len(estimator.copy().setParams(epochs=1, **settings).fit(table).summary.history["loss"])


@pytest.mark.whole
def test_regression_predicts_a_number(spark, problem, table):
    """A regression predicts a double, for RegressionEvaluator, and has no column of probabilities."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    numbers = table.withColumn("label", functions.col("a") * 2 + 1)

    out = KerasEstimator(model=model, epochs=4, numWorkers=2, seed=1).fit(numbers).transform(numbers)

    assert [*numbers.columns, "prediction"] == out.columns
    assert "double" == out.schema["prediction"].dataType.simpleString()
    assert RegressionEvaluator(metricName="r2").evaluate(out) > 0.5


@pytest.mark.whole
def test_all_kinds_of_feature_columns_give_the_same(spark, problem, estimator, table):
    """Sparse vectors, arrays and scalar columns train and predict as dense vectors do."""
    reference = estimator.fit(table)
    rows = reference.transform(table).orderBy("row").collect()

    for columns in ("sparse", "array", NAMES):
        fitted = estimator.fit(table, {estimator.featuresCol: columns})

        np.testing.assert_allclose(weights_of(reference), weights_of(fitted), atol=1e-6)
        found = fitted.transform(table).orderBy("row").collect()
        np.testing.assert_allclose(
            *[[row.probability.toArray() for row in part] for part in (rows, found)], atol=1e-5
        )


@pytest.mark.whole
def test_nested_arrays_are_features(spark, problem, table):
    """Nested arrays train and predict as in Keras, whatever the inference batch size."""
    nested = functions.array(functions.array(*NAMES[:3]), functions.array(*NAMES[3:]))
    frame = table.withColumn("nested", nested)
    layers = [keras.Input((2, 3)), keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    model = keras.Sequential(layers)
    model.compile("sgd", "sparse_categorical_crossentropy")

    fitted = KerasEstimator(model=model, featuresCol="nested", numWorkers=2, seed=1).fit(frame)

    expected = fitted.getModel().predict(problem.x.reshape(-1, 2, 3), verbose=0)
    for size in (7, 1024):
        rows = fitted.setInferenceBatchSize(size).transform(frame).orderBy("row").collect()
        np.testing.assert_allclose(expected, [row.probability.toArray() for row in rows], atol=1e-5)


class Named(keras.layers.Layer):
    """A layer that calls a function registered by name, and logs the process that made it."""

    def __init__(self, function, path, **options):
        super().__init__(**options)
        self.given = {"function": function, "path": path}
        self.apply = keras.saving.get_registered_object(function)
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")

    def call(self, x):
        return self.apply(x)

    def get_config(self):
        return super().get_config() | self.given


def made_of_named(path, units):
    """Return a model with a Named layer, and the custom objects that it needs."""
    custom = {"Named": Named, "twice": lambda x: 2 * x}
    with keras.saving.custom_object_scope(custom):
        layers = [keras.Input((6,)), Named("twice", str(path)), keras.layers.Dense(units)]
        model = keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model, custom


@pytest.mark.whole
def test_custom_objects_go_with_the_stages(spark, problem, table, tmp_path):
    """Objects known only through customObjects are found in training and in prediction."""
    model, custom = made_of_named(tmp_path / "made", 4)

    fitted = KerasEstimator(model=model, customObjects=custom, numWorkers=2, seed=1).fit(table)

    row = fitted.transform(table).orderBy("row").first()
    expected = fitted.getModel().predict(problem.x[:1], verbose=0)[0]
    np.testing.assert_allclose(expected, row.probability.toArray(), atol=1e-5)


@pytest.mark.whole
def test_each_python_process_makes_one_model(spark, problem, table, tmp_path):
    """Each Python process makes one model, for all tasks of this transform and the next."""
    model, custom = made_of_named(tmp_path / "made", 5)
    transformer = KerasTransformer(model=model, customObjects=custom)

    for _ in range(2):
        assert 203 == len(transformer.transform(table.repartition(6)).select("prediction").collect())

    made = collections.Counter((tmp_path / "made").read_text().split())
    made.pop(str(os.getpid()))  # the process that made the model first
    assert {1} == set(made.values()), made


@pytest.mark.whole
def test_several_inputs_and_outputs_are_mapped_by_name(spark, problem, table):
    """A mapping assigns columns to inputs either way; the prediction is a struct with a field per output."""
    left, right = keras.Input((6,), name="left"), keras.Input((2,), name="right")
    both = keras.layers.concatenate([left, right])
    outputs = {
        "kind": keras.layers.Dense(3, activation="softmax", name="kind")(both),
        "size": keras.layers.Dense(1, name="size")(both),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile("adam", {"kind": "sparse_categorical_crossentropy", "size": "mse"})
    labels = {"kind": "label", "size": "a"}
    params = {"model": model, "labelCol": labels, "numWorkers": 2, "seed": 1}

    fitted = KerasEstimator(featuresCol={"left": "features", "right": ["a", "b"]}, **params).fit(table)
    pairs = table.withColumn("pair", functions.array("a", "b"))
    params["labelCol"] = {"label": "kind", "a": "size"}
    turned = KerasEstimator(featuresCol={"features": "left", "pair": "right"}, **params).fit(pairs)

    np.testing.assert_allclose(weights_of(fitted), weights_of(turned), atol=1e-6)
    out = fitted.transform(table)
    assert ["kind", "size"] == out.schema["prediction"].dataType.names
    row = out.orderBy("row").first()
    expected = fitted.getModel().predict({"left": problem.x[:1], "right": problem.x[:1, :2]}, verbose=0)
    np.testing.assert_allclose(expected["kind"][0], row.prediction.kind, atol=1e-5)
    assert row.prediction.size == pytest.approx(expected["size"][0, 0], abs=1e-5)


@pytest.mark.whole
def test_rows_are_held_out_by_a_column(spark, problem, estimator, table):
    """Rows of the indicator column are validated on, in the same pass, and never trained on."""
    fitted = estimator.copy({estimator.validationIndicatorCol: "held"}).fit(table)

    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(fitted.summary.history)
    held = np.arange(203) % 5 == 0
    assert (~held).sum() == fitted.summary.training["rows"]
    loss, accuracy = fitted.getModel().evaluate(problem.x[held], problem.y[held], verbose=0)
    assert loss == pytest.approx(fitted.summary.history["val_loss"][-1], rel=1e-4)
    assert accuracy == pytest.approx(fitted.summary.history["val_accuracy"][-1])


@pytest.mark.whole
@pytest.mark.classic  # preservePartitions needs the number of partitions
@pytest.mark.parametrize("stay", [True, False])
def test_rows_that_are_held_out_may_be_a_partition_of_their_own(spark, problem, estimator, table, stay):
    """Held-out rows in one partition are dealt to all workers, or stay with one that then trains none."""
    settings = {estimator.validationIndicatorCol: "held", estimator.preservePartitions: stay}

    fitted = estimator.fit(table.repartitionByRange(2, "held"), settings)

    assert 162 == fitted.summary.training["rows"]
    assert stay == (0 in fitted.summary.training["worker_rows"])
    place = np.arange(203) % 5 == 0
    loss, _ = fitted.getModel().evaluate(problem.x[place], problem.y[place], verbose=0)
    assert loss == pytest.approx(fitted.summary.history["val_loss"][-1], rel=1e-4)


@pytest.mark.whole
def test_a_column_that_holds_out_no_row_is_refused(spark, estimator, table):
    """An indicator column that selects no rows raises, as an empty validationSplit does."""
    none = table.withColumn("held", functions.lit(False))

    with pytest.raises(
        DataError, match="'held' marks none of the 203 rows for validation. Mark some rows, or leave"
    ):
        estimator.fit(none, {estimator.validationIndicatorCol: "held"})


@pytest.mark.whole
@pytest.mark.parametrize(("workers", "size"), [(1, 16), (2, 203)])  # in the order of the rows, or all at once
def test_a_summary_has_the_history_of_plain_keras(spark, problem, estimator, table, workers, size):
    """The summary's training and validation history, and the weights, are those of plain Keras."""
    reference = problem.model(keras.optimizers.SGD(0.3, momentum=0.9))
    settings = {
        "model": keras.models.clone_model(reference),
        "numWorkers": workers,
        "batchSize": size,
        "epochs": 3,
        "shuffle": False,
        "validationIndicatorCol": "held",
    }
    settings["model"].compile(keras.optimizers.SGD(0.3, momentum=0.9), reference.loss, metrics=["accuracy"])
    settings["model"].set_weights(start := reference.get_weights())

    fitted = KerasEstimator(**settings).fit(table)

    order = np.array([row.row for row in table.select("row").collect()])
    held, others = order[order % 5 == 0], order[order % 5 != 0]
    expected = reference.fit(
        problem.x[others],
        problem.y[others],
        size,
        3,
        shuffle=False,
        verbose=0,
        validation_data=(problem.x[held], problem.y[held]),
    )
    assert set(expected.history) == set(fitted.summary.history)
    for name, values in expected.history.items():
        assert values == pytest.approx(fitted.summary.history[name], rel=1e-4), name
    assert 3 == len(fitted.summary.objectiveHistory) == fitted.summary.totalIterations
    assert problem.distance(fitted.getModel(), reference, start) <= 1


@pytest.mark.whole
def test_a_trained_model_is_gone_on_with(spark, problem, table):
    """Training continues from a trained or fitted model's weights and optimizer momentum."""
    reference = problem.model(keras.optimizers.SGD(0.3, momentum=0.9))
    start = reference.get_weights()
    order = [row.row for row in table.select("row").collect()]
    data, settings = (problem.x[order], problem.y[order]), {"batch_size": 16, "shuffle": False, "verbose": 0}
    reference.fit(*data, **settings)
    estimator = KerasEstimator(model=reference, numWorkers=1, batchSize=16, shuffle=False)

    first = estimator.fit(table)
    second = estimator.fit(table, {estimator.model: first.getModel()})

    assert [13, 26, 39] == [
        int(each.optimizer.iterations) for each in (reference, first.getModel(), second.getModel())
    ]
    reference.fit(*data, epochs=2, **settings)
    assert problem.distance(second.getModel(), reference, start) <= 1


@pytest.mark.whole
def test_weights_of_rows_are_a_column(spark, problem, estimator, table):
    """Rows of weight zero teach nothing, whatever their labels."""
    weighed = table.withColumn("weight", (~functions.col("held")).cast("double"))
    lies = functions.when(functions.col("held"), 2.0).otherwise(functions.col("label"))

    fitted = [
        estimator.copy({estimator.weightCol: "weight"}).fit(frame)
        for frame in (weighed, weighed.withColumn("label", lies))
    ]

    np.testing.assert_allclose(*map(weights_of, fitted), atol=1e-6)


@pytest.mark.parametrize("stage", [KerasEstimator, KerasTransformer])
def test_params_are_given_by_name(problem, stage):
    """Positional arguments are refused: there are too many Params to know their order."""
    with pytest.raises(TypeError, match="1 positional argument but 2 were given"):
        stage(problem.model())


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"validationIndicatorCol": "label"}, ConfigError, "'label' of booleans that .* it holds double"),
        ({"validationIndicatorCol": "absent"}, ConfigError, "a column 'absent'; the DataFrame has row, a, b"),
        (
            {"validationIndicatorCol": "held", "validationSplit": 0.1},
            ConfigError,
            "got more than one. Pass one of them",
        ),
        ({"featuresCol": "words"}, ConfigError, "Expected column 'words' to hold numbers.* string"),
        ({"featuresCol": "price"}, ConfigError, r"Expected column 'price' to hold numbers.* decimal"),
        ({"featuresCol": "day"}, ConfigError, "Expected column 'day' to hold numbers.* timestamp"),
        ({"staleness": 2}, ConfigError, 'staleness=2 with mode="synchronous"'),
        ({"numWorkers": 77}, Exception, "num_workers=77 needs 77 slots"),
    ],
)
def test_a_fit_that_cannot_be_is_refused_before_a_job(spark, estimator, table, jobs, params, error, message):
    """Columns and settings are checked on the driver, before any job."""
    frame = table.withColumns(
        {
            "words": functions.lit("word"),
            "price": functions.lit("1.5").cast("decimal(3,1)"),
            "day": functions.current_timestamp(),
        }
    )
    before = jobs()

    with pytest.raises(error, match=message):
        estimator.copy({estimator.getParam(name): value for name, value in params.items()}).fit(frame)

    assert before == jobs()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["float", "float"], "float"),
        (["float", "smallint"], "float"),
        (["float", "double"], "double"),
        (["int", "float"], "double"),
    ],
)
def test_several_columns_are_no_wider_than_they_have_to_be(spark, kinds, expected):
    """All columns whose values fit into 32-bit floats go to Python as 32-bit floats."""
    frame = spark.range(1).selectExpr(*(f"cast(1 as {kind}) as c{place}" for place, kind in enumerate(kinds)))
    source = frame_source(frame, (["c0", "c1"],), (1,))

    assert [("c0", f"array<{expected}>")] == frame.select(*source.selected).dtypes


ODD = {  # not numbers yet, one value each
    "price": "cast(1.5 as decimal(3,1))",
    "prices": "array(cast(1.5 as decimal(3,1)))",
    "nested": "array(array(cast(1.5 as decimal(3,1))))",
    "day": "date'2026-11-24'",
    "days": "array(date'2026-11-24')",
    "time": "timestamp'2026-11-24 12:00:00'",
    "plain": "timestamp_ntz'2026-11-24 12:00:00'",
    "written": "'1.5'",
    "writings": "array('1.5')",
}


@pytest.mark.whole
def test_the_remedy_that_is_named_for_a_column_works(spark):
    """The remedy in the error works: the test evaluates the expression from the message."""
    df = spark.range(1).selectExpr(*(f"{value} as {name}" for name, value in ODD.items()))
    for name in ODD:
        with pytest.raises(ConfigError, match=f"Expected column '{name}' to hold numbers") as caught:
            frame_source(df, (name,), (1,))
        (remedy,) = re.findall(r'df\["\w+"\]\.cast\S+\)(?=,| if)', str(caught.value))
        mended = df.withColumn(name, eval(remedy, {"df": df}))
        assert 1 == frame_source(mended, (name,), (1,)).peek().values[0].size
    words = StringIndexer(inputCol="written", outputCol="index").fit(df).transform(df)
    many = HashingTF(numFeatures=1, inputCol="writings", outputCol="hashed").transform(words)
    for name in ("index", "hashed"):
        assert 1 == frame_source(many, (name,), (1,)).peek().values[0].size


def test_what_a_transform_cannot_do_is_refused_without_a_job(spark, problem, table, jobs):
    """A transform to an existing column, without a valid model or without its input runs no job."""
    model = problem.model()
    before = jobs()

    with pytest.raises(ConfigError, match="already has a column 'label'"):
        KerasTransformer(model=model, predictionCol="label").transform(table)
    with pytest.raises(ModelError, match=r"should be a keras\.Model; got str"):
        KerasTransformer(model="model").transform(table)
    with pytest.raises(ModelError, match="KerasTransformer has no model"):
        KerasTransformer().transform(table)
    with pytest.raises(ConfigError, match="Expected a column 'features'"):
        KerasTransformer(model=model).transform(table.drop("features"))
    with pytest.raises(ModelError, match="no training summary"):
        _ = KerasEstimatorModel(model).summary
    assert before == jobs()


def test_two_columns_of_one_name_are_refused(spark, problem, table):
    """Two output columns of one name are refused, compared as Spark compares names."""
    model = problem.model()
    same = KerasTransformer(model=model, predictionCol="p", probabilityCol="p", rawPredictionCol="p")
    alike = KerasTransformer(model=model, predictionCol="P", probabilityCol="p")

    with pytest.raises(ConfigError, match="Two new columns would have the name 'p'. Give each a name"):
        same.transform(table)
    with pytest.raises(ConfigError, match="Two new columns would have the name 'P'"):
        alike.transform(table)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert ["p", "P"] == alike.transform(table).columns[-2:]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.whole
def test_a_row_that_no_model_takes_is_named_where_it_is_predicted(spark, problem, table):
    """A vector of another size raises an error that names its row, in the job that predicts it."""
    short = functions.when(functions.col("row") == 7, functions.array(functions.lit(1.0))).otherwise(
        functions.col("array")
    )

    with pytest.raises(
        Exception, match=r"Expected array of shape \(6,\) \(6 values\); row \d+ of a batch has 1 values\."
    ):
        KerasTransformer(model=problem.model(), featuresCol="array").transform(
            table.withColumn("array", short)
        ).collect()


@pytest.mark.whole
def test_a_model_that_was_never_compiled_predicts(spark, problem, table):
    """An uncompiled model predicts; only training needs an optimizer, and the task may be set."""
    model = keras.Sequential(problem.model().layers)

    plain = KerasTransformer(model=model).transform(table).orderBy("row").first()
    classes = KerasTransformer(model=model, task="classification", rawPredictionCol="").transform(table)

    expected = model.predict(problem.x[:1], verbose=0)[0]
    np.testing.assert_allclose(expected, plain.prediction, atol=1e-6)
    assert [*table.columns, "probability", "prediction"] == classes.columns
    assert float(expected.argmax()) == classes.orderBy("row").first().prediction


@pytest.mark.whole
def test_a_pipeline_is_saved_and_gives_the_same_bits_in_another_process(spark, problem, table, tmp_path):
    """A fitted pipeline with Spark's stages gives the same bits after it is loaded in another process."""
    named = table.drop("features", "label").withColumn(
        "kind", functions.when(functions.col("a") > 0, "up").otherwise("down")
    )
    named.coalesce(1).write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    stages = [
        StringIndexer(inputCol="kind", outputCol="label"),
        VectorAssembler(inputCols=NAMES, outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="features", withMean=True),
        KerasEstimator(model=problem.model(), numWorkers=2, seed=1),
    ]

    fitted = Pipeline(stages=stages).fit(rows)
    fitted.save(str(tmp_path / "model"))

    mine = fitted.transform(rows).select("row", "probability").orderBy("row").collect()
    script = f"""
        from pyspark.ml import PipelineModel
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        rows = spark.read.parquet({str(tmp_path / "rows")!r})
        out = PipelineModel.load({str(tmp_path / "model")!r}).transform(rows)
        for row in out.select("row", "probability").orderBy("row").collect():
            print("ROW", row.row, *(float(value).hex() for value in row.probability))
        spark.stop()
    """
    classic = {name: value for name, value in os.environ.items() if name != "SPARK_CONNECT_MODE_ENABLED"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=classic,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    theirs = [line for line in done.stdout.splitlines() if line.startswith("ROW")]
    assert [f"ROW {row.row} {' '.join(float(v).hex() for v in row.probability)}" for row in mine] == theirs


@pytest.fixture
def mounted(spark, tmp_path):
    """The URI of a ViewFs file system that is not the default one; its /models are in tmp_path."""
    configuration, name = spark.sparkContext._jsc.hadoopConfiguration(), tmp_path.name
    (tmp_path / "models").mkdir()
    key = f"fs.viewfs.mounttable.{name}.link./models"
    configuration.set(key, (tmp_path / "models").as_uri())
    yield f"viewfs://{name}"
    configuration.unset(key)


@pytest.fixture(params=["another", "default"])
def place(request, spark, mounted):
    """A folder to save into: a URI, or a path of the default file system."""
    if request.param == "another":
        yield f"{mounted}/models"
        return
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    before = configuration.get("fs.defaultFS")
    configuration.set("fs.defaultFS", mounted)
    yield "/models"
    configuration.set("fs.defaultFS", before)


@pytest.mark.whole
@pytest.mark.classic  # over Spark Connect, the server's file system is the default one
def test_a_pipeline_is_saved_on_any_file_system_of_hadoop(spark, problem, table, tmp_path, place):
    """A pipeline with its model file is saved to any Hadoop file system and loads with the same bits."""
    rows = table.drop("features")
    assembler = VectorAssembler(inputCols=NAMES, outputCol="features")
    keras_stage = KerasEstimator(model=problem.model(), numWorkers=2, seed=1)
    fitted = Pipeline(stages=[assembler, keras_stage]).fit(rows)

    for _ in range(2):
        fitted.write().overwrite().save(f"{place}/fitted")

    loaded = PipelineModel.load(f"{place}/fitted")
    mine, theirs = (
        [row.probability for row in each.transform(rows).orderBy("row").collect()]
        for each in (fitted, loaded)
    )
    assert mine == theirs
    (file,) = tmp_path.rglob("model.keras")
    assert file.is_relative_to(tmp_path / "models" / "fitted" / "stages")
    np.testing.assert_array_equal(weights_of(loaded.stages[1]), weights_of(fitted.stages[1]))


def test_an_estimator_is_saved_with_its_params_and_its_model(spark, problem, estimator, table, tmp_path):
    """A loaded estimator trains to the same weights, by the same rule."""
    made = estimator.copy({estimator.frequency: 3, estimator.merge: DiLoCo(0.5)})
    made.write().overwrite().save(str(tmp_path / "estimator"))
    made.write().overwrite().save(str(tmp_path / "estimator"))

    loaded = KerasEstimator.load(str(tmp_path / "estimator"))

    assert made.uid == loaded.uid
    assert (3, DiLoCo(0.5), 16) == (loaded.getFrequency(), loaded.getMerge(), loaded.getBatchSize())
    np.testing.assert_allclose(*[weights_of(each.fit(table)) for each in (made, loaded)], atol=1e-6)
    with pytest.raises(ModelError, match="holds a sparkdl.ml.KerasEstimator, not a KerasEstimatorModel"):
        KerasEstimatorModel.load(str(tmp_path / "estimator"))


class Halved(Rule):
    """A custom rule, which no file can hold."""

    name = "halved"


@pytest.mark.whole
def test_a_fitted_model_has_the_params_that_it_was_trained_with(spark, problem, estimator, table, tmp_path):
    """A fitted model keeps its Params, thresholds too, when it is copied, saved and loaded."""
    estimator.setMerge(None).setFrequency("epoch").setThresholds([0.2, 0.5, 0.0]).setClassWeight({0: 2.0})
    grid = ParamGridBuilder().addGrid(estimator.batchSize, [16, 64]).build()

    fitted = [each for _, each in sorted(estimator.fitMultiple(table, grid))]

    assert [16, 64] == [each.getBatchSize() for each in fitted]
    fitted[0].setMerge(Halved())  # it is dropped when the model is saved
    fitted[0].save(str(tmp_path / "fitted"))
    loaded = KerasEstimatorModel.load(str(tmp_path / "fitted"))
    for each in (fitted[0], loaded, fitted[0].copy()):
        assert (16, 2, "epoch", 2, 1) == (
            each.getBatchSize(),
            each.getNumWorkers(),
            each.getFrequency(),
            each.getEpochs(),
            each.getSeed(),
        )
        assert ({0: 2.0}, [0.2, 0.5, 0.0]) == (each.getClassWeight(), each.getThresholds())
    assert not loaded.isDefined("merge")
    rows = [row.prediction for row in loaded.transform(table).collect()]
    assert {2.0} == set(rows)
    of_spark = table.limit(5).select("features", "label", "row")
    other = KerasTransformer(model=fitted[0].getModel(), thresholds=[0.1, 0.6, 0.3]).transform(of_spark)
    for row in other.collect():
        assert int(np.argmax(row.probability.toArray() / [0.1, 0.6, 0.3])) == row.prediction
    with pytest.raises(ConfigError, match="got 2 for 3 classes"):
        estimator.setThresholds([0.5, 0.5]).fit(table)


@pytest.mark.parametrize("of", ["paramMap", "defaultParamMap"])
def test_where_a_fit_runs_is_no_part_of_a_saved_stage(spark, problem, tmp_path, caplog, of):
    """A saved stage does not set where a fit runs, so it cannot redirect the token and the weights."""
    place = {
        "bindAddress": "127.0.0.1",
        "advertisedHost": "127.0.0.2",
        "port": 40001,
        "tls": False,
        "placement": "worker",
        "checkpoint": str(tmp_path / "theirs"),
        "resume": True,
    }
    KerasEstimator(model=problem.model(), epochs=3, **place).save(str(tmp_path / "stage"))
    (path,) = (tmp_path / "stage" / "metadata").glob("part-*")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {of: saved[of] | place}))
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    loaded = KerasEstimator.load(str(tmp_path / "stage"))

    assert not saved["paramMap"].keys() & place.keys()
    assert not any(loaded.isDefined(name) for name in place)
    assert loaded.getEpochs() == 3
    assert f" sets {', '.join(place)}. These settings depend on the machine" in "\n".join(caplog.messages)


def twice(x):
    return 2 * x


@pytest.mark.whole
def test_code_is_left_out_with_a_warning_and_set_again(spark, problem, table, tmp_path, caplog):
    """A loaded stage trains and predicts once its functions and callbacks are set again."""
    custom, decode = {"twice": twice}, {"text": lambda text: np.array(text.split(), "float32")}
    frame = table.withColumn("text", functions.concat_ws(" ", *NAMES))
    layers = [keras.Input((6,)), keras.layers.Dense(4, twice), keras.layers.Dense(3, "softmax")]
    model, seen = keras.Sequential(layers), []
    model.compile("sgd", "sparse_categorical_crossentropy")
    noting = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))]
    code = {"customObjects": custom, "decode": decode}
    estimator = KerasEstimator(
        model=model, featuresCol="text", epochs=2, numWorkers=2, seed=1, callbacks=noting, **code
    )

    estimator.save(str(tmp_path / "estimator"))
    fitted = estimator.fit(frame)
    fitted.save(str(tmp_path / "fitted"))
    with keras.saving.custom_object_scope(custom):
        again = KerasEstimator.load(str(tmp_path / "estimator"))
        loaded = KerasEstimatorModel.load(str(tmp_path / "fitted"))

    says = f"These Params of {fitted.uid} contain code and were not saved:"
    rest = f"customObjects, decode. Set them again on the loaded stage.{CUSTOM}"
    assert [f"{says} callbacks, {rest}", f"{says} {rest}"] == [
        each for each in caplog.messages if "not saved" in each
    ]
    assert not any(each.isSet(name) for each in (again, loaded) for name in code)
    assert not again.isSet("callbacks")
    with pytest.raises(ConfigError, match="Expected column 'text' to hold numbers"):
        loaded.transform(frame)
    assert [0, 1] == seen
    refitted = again.setParams(callbacks=noting, **code).fit(frame)
    np.testing.assert_allclose(weights_of(fitted), weights_of(refitted), atol=1e-6)
    assert [0, 1, 0, 1] == seen
    predicted = (each.transform(frame).orderBy("row").first() for each in (fitted, loaded.setParams(**code)))
    assert len({row.probability for row in predicted}) == 1


@pytest.mark.whole
def test_a_fitted_model_is_a_keras_file_and_keeps_its_history(spark, problem, estimator, table, tmp_path):
    """A saved model.keras loads without Spark; the summary's history is restored; a URI works as a path."""
    fitted = estimator.fit(table)
    place = f"{'file://' if hasattr(spark, 'sparkContext') else ''}{tmp_path}/fitted"
    fitted.save(place)

    loaded = KerasEstimatorModel.load(place)
    plain = keras.saving.load_model(tmp_path / "fitted" / "model.keras")

    assert fitted.summary.history == loaded.summary.history
    assert "2 epochs" in repr(loaded.summary)
    fitted.summary.report(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text("utf-8")
    np.testing.assert_array_equal(weights_of(fitted), weights_of(loaded))
    np.testing.assert_array_equal(plain.predict(problem.x), loaded.getModel().predict(problem.x))
    again = KerasTransformer(model=plain, predictionCol="guess")
    again.save(str(tmp_path / "transformer"))
    assert "guess" in KerasTransformer.load(str(tmp_path / "transformer")).transform(table).columns


@pytest.mark.whole
def test_a_metric_with_several_values_is_saved(spark, problem, table, tmp_path):
    """The history of a metric that has a value for each class is saved as lists of numbers."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    classes = [(functions.col("label") == each).cast("float") for each in range(3)]
    frame = table.withColumn("label", functions.array(*classes))
    fitted = KerasEstimator(model=model, numWorkers=1, epochs=2).fit(frame)
    fitted.save(str(tmp_path / "fitted"))

    history = KerasEstimatorModel.load(str(tmp_path / "fitted")).summary.history["f1_score"]
    np.testing.assert_array_equal(fitted.summary.history["f1_score"], history)
    assert (2, 3) == np.shape(history)


def test_a_pipeline_that_is_not_fitted_is_saved(spark, estimator, tmp_path):
    """An unfitted pipeline keeps its Params and weights when it is saved and loaded."""
    assembler = VectorAssembler(inputCols=NAMES, outputCol="features")
    Pipeline(stages=[assembler, estimator]).save(str(tmp_path / "pipeline"))

    first, loaded = Pipeline.load(str(tmp_path / "pipeline")).getStages()

    assert (NAMES, 16, 2) == (first.getInputCols(), loaded.getBatchSize(), loaded.getEpochs())
    np.testing.assert_array_equal(weights_of(estimator), weights_of(loaded))


@pytest.mark.whole
def test_a_model_that_a_function_builds_is_not_saved(spark, problem, table, tmp_path):
    """A model that a function builds cannot be saved; each fit builds it anew."""

    def build():
        import keras

        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    built = KerasEstimator(model=build, numWorkers=2, seed=1)

    first, second = (weights_of(built.fit(table)) for _ in range(2))

    np.testing.assert_allclose(first, second, atol=1e-6)
    with pytest.raises(ModelError, match="whose model is a function cannot be saved"):
        built.save(str(tmp_path / "built"))


@pytest.mark.whole
def test_several_param_maps_are_fitted(spark, estimator, table):
    """`fit` with a list of Param maps gives a model for each, with its own history."""
    maps = [{estimator.epochs: 1}, {estimator.epochs: 2, estimator.mode: "asynchronous"}]

    fitted = estimator.fit(table, maps)  # by fitMultiple

    assert [1, 2] == [each.summary.totalIterations for each in fitted]


def test_fits_that_would_resume_from_one_folder_are_refused(estimator, table, tmp_path):
    """With a list of Param maps, each fit needs a checkpoint folder of its own to resume from."""
    shared = estimator.copy({estimator.checkpoint: str(tmp_path / "one"), estimator.resume: True})
    with pytest.raises(ConfigError, match="Each fit needs a checkpoint folder of its own.*one.* with resume"):
        shared.fit(table, [{estimator.epochs: 1}, {estimator.epochs: 2}])

    maps = [{estimator.epochs: 1, estimator.checkpoint: str(tmp_path / name)} for name in "ab"]
    assert [1, 1] == [each.summary.totalIterations for each in shared.fit(table, maps)]


@pytest.mark.whole
@leaves_its_pool
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_cross_validation_fits_several_at_once(spark, estimator, table, tmp_path, mode):
    """Parallel fits of cross-validation wait for all their slots; the best model is saved and loaded."""
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 3]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    search = CrossValidator(
        estimator=estimator.copy({estimator.mode: mode}),
        estimatorParamMaps=grid,
        evaluator=evaluator,
        numFolds=2,
        parallelism=2,
        seed=1,
    )

    found = search.fit(table)

    assert found.avgMetrics[1] > found.avgMetrics[0]
    assert 3 == found.bestModel.summary.totalIterations
    found.save(str(tmp_path / "search"))
    loaded = CrossValidatorModel.load(str(tmp_path / "search"))
    assert loaded.avgMetrics == pytest.approx(found.avgMetrics)
    np.testing.assert_array_equal(weights_of(found.bestModel), weights_of(loaded.bestModel))


@pytest.mark.whole
@leaves_its_pool
def test_fits_of_model_selection_are_under_way_at_once(spark, estimator, table):
    """Two fits of a cross-validation run at once: each waits for the other in its first epoch."""

    class Meeting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.came, self.barrier = [], threading.Barrier(2)

        def on_epoch_begin(self, epoch, logs=None):
            self.came.append(epoch)
            if len(self.came) <= 2:
                self.barrier.wait(120)

    made = estimator.copy({estimator.callbacks: [Meeting()], estimator.numWorkers: 1, estimator.epochs: 1})
    search = CrossValidator(
        estimator=made,
        estimatorParamMaps=ParamGridBuilder().addGrid(made.batchSize, [64, 128]).build(),
        evaluator=MulticlassClassificationEvaluator(),
        numFolds=2,
        parallelism=2,
        seed=1,
    )

    assert 2 == len(search.fit(table).avgMetrics)


@pytest.mark.whole
@leaves_its_pool
def test_four_fits_at_once_find_what_one_alone_finds(spark, estimator, table):
    """Four parallel fits of one worker each share the slots and find the models of sequential fits."""
    alone = estimator.copy({estimator.numWorkers: 1})
    grid = ParamGridBuilder().addGrid(alone.epochs, [1, 3]).addGrid(alone.batchSize, [16, 64]).build()
    folds = table.withColumn("fold", (functions.col("row") % 2).cast("int"))

    found = CrossValidator(
        estimator=alone,
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(),
        numFolds=2,
        foldCol="fold",
        parallelism=4,
        collectSubModels=True,
    ).fit(folds)

    for params, fitted in zip(grid, found.subModels[0], strict=True):
        expected = alone.fit(folds.filter("fold != 0"), params)
        np.testing.assert_allclose(weights_of(expected), weights_of(fitted), atol=1e-6)
    assert [1, 1, 3, 3] == [fitted.summary.totalIterations for fitted in found.subModels[1]]


@pytest.mark.whole
@leaves_its_pool
def test_a_split_finds_the_better_learning_rate_over_models(spark, problem, estimator, table):
    """A grid may search over models: the model is a Param like any other."""
    models = [problem.model(keras.optimizers.Adam(rate)) for rate in (1e-6, 0.05)]
    grid = ParamGridBuilder().addGrid(estimator.model, models).build()

    found = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(),
        parallelism=2,
        seed=1,
    ).fit(table)

    assert found.validationMetrics[1] > found.validationMetrics[0]


@pytest.mark.whole
def test_empty_partitions_and_fewer_partitions_than_workers_do_no_harm(spark, estimator, table):
    """Empty partitions, and fewer partitions than workers, change neither training nor predictions."""
    one = table.coalesce(1)
    holes = one.union(table.filter("row < 0").repartition(3))

    fitted = [estimator.fit(frame) for frame in (one, holes)]

    assert [203, 203] == [each.summary.training["rows"] for each in fitted]
    assert 203 == fitted[1].transform(holes).filter("prediction is not null").count()
    assert 0 == fitted[0].transform(table.filter("row < 0")).count()


@pytest.mark.whole
@pytest.mark.one_case
def test_predictions_stay_with_their_rows(spark, problem, table, tmp_path):
    """Predictions stay with their rows when those are shuffled, repartitioned and read from many files."""
    frame = table.select("row", "array").repartition(7).sortWithinPartitions(functions.rand(1))
    frame.write.option("maxRecordsPerFile", 11).parquet(str(tmp_path / "many"))
    read = spark.read.parquet(str(tmp_path / "many")).repartition(5, functions.rand(2))
    model = problem.model()

    out = KerasTransformer(model=model, featuresCol="array", inferenceBatchSize=16).transform(read)
    rows = out.orderBy(functions.rand(3)).collect()

    assert list(range(203)) == sorted(row.row for row in rows)
    expected = model.predict(problem.x, verbose=0)
    np.testing.assert_allclose(
        [expected[row.row] for row in rows], [row.probability.toArray() for row in rows], atol=1e-5
    )


@pytest.mark.whole
def test_predictions_do_not_depend_on_the_size_of_batches(spark, problem, table):
    """Predictions for any batch size agree up to the rounding of matrix products."""
    transformer = KerasTransformer(model=problem.model())

    found = {
        size: [
            row.probability.toArray()
            for row in transformer.setInferenceBatchSize(size).transform(table).orderBy("row").collect()
        ]
        for size in (1, 2, 7, 64, 1024)
    }

    for size, rows in found.items():
        np.testing.assert_allclose(found[1024], rows, rtol=1e-5, atol=1e-7, err_msg=str(size))


@pytest.mark.whole
def test_sql_predicts(spark, problem, table):
    """A registered model predicts in SQL; an argument of the wrong type is an error of the query."""
    model = problem.model()
    spark.udf.register("score", predict_udf(model, batch_size=50))
    table.createOrReplaceTempView("points")

    rows = spark.sql(
        "SELECT row, score(array) AS p, score(array)[1] AS one FROM points ORDER BY row"
    ).collect()

    expected = model.predict(problem.x, verbose=0)
    np.testing.assert_allclose(expected, [row.p for row in rows], atol=1e-5)
    np.testing.assert_allclose(expected[:, 1], [row.one for row in rows], atol=1e-5)
    if hasattr(functions, "arrow_udf"):
        (found,) = spark.sql("SELECT score(sparse) AS p FROM points WHERE row = 3").collect()
        np.testing.assert_allclose(expected[3], found.p, atol=1e-5)
    with pytest.raises(
        Exception, match=r"hold numbers, .*; row 0 of a batch has .*decimal.* with column\.cast"
    ):
        spark.sql("SELECT score(array(1.5)) FROM points").collect()
    with pytest.raises(ModelError, match="The input shapes of the model"):
        predict_udf(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.whole
@pytest.mark.each_master
def test_a_stream_is_predicted(spark, problem, table, tmp_path):
    """Rows of a streaming source are predicted as they arrive, without a look at the first row."""
    model = problem.model()
    frame = table.select("row", "array")
    source, done = tmp_path / "in", tmp_path / "done"
    frame.filter("row < 100").coalesce(1).write.parquet(str(source))
    stream = spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1).parquet(str(source))

    out = KerasTransformer(model=model, featuresCol="array").transform(stream)
    frame.filter("row >= 100").coalesce(1).write.mode("append").parquet(str(source))
    writer = out.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "marks"))
    writer.trigger(availableNow=True).start(str(done)).awaitTermination()

    rows = spark.read.parquet(str(done)).orderBy("row").collect()
    assert 203 == len(rows)
    np.testing.assert_allclose(
        model.predict(problem.x, verbose=0), [row.probability.toArray() for row in rows], atol=1e-5
    )
    if not hasattr(spark, "sparkContext"):
        predicted = stream.select(predict_udf(model)("array").alias("made"))
        writer = predicted.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "udf"))
        with pytest.raises(Exception, match="tasks of a streaming query cannot read"):
            writer.trigger(availableNow=True).start(str(tmp_path / "never")).awaitTermination()


@pytest.mark.whole
@pytest.mark.classic  # over Spark Connect, the function of foreachBatch runs on the server
def test_a_stream_trains_batch_by_batch(spark, problem, table, tmp_path):
    """A SparkModel in `foreachBatch` keeps its weights and optimizer from batch to batch."""
    source = tmp_path / "in"
    table.select("features", "label").repartition(3).write.parquet(str(source))
    model, losses = problem.model(keras.optimizers.Adam(0.02)), []
    spark_model = SparkModel(model, num_workers=2)
    stream = spark.readStream.schema(table.select("features", "label").schema)

    def train(batch, number):
        losses.extend(spark_model.fit(batch, epochs=2, batch_size=16, verbose=0, seed=number).history["loss"])

    query = stream.option("maxFilesPerTrigger", 1).parquet(str(source)).writeStream.foreachBatch(train)
    query.option("checkpointLocation", str(tmp_path / "marks")).trigger(
        availableNow=True
    ).start().awaitTermination()

    assert 6 == len(losses)
    assert losses[-1] < losses[0]
    assert 6 * 5 <= int(model.optimizer.iterations) <= 6 * 6  # 203 rows in three files, 16 to a batch, twice


@pytest.mark.whole
def test_a_null_indicator_ends_the_first_pass(spark, estimator, table):
    """A null in the indicator column raises: such a row is neither for training nor for validation."""
    frame = table.withColumn("held", functions.when(functions.col("row") != 9, functions.col("held")))

    with pytest.raises(DataError, match="in the column that marks validation rows"):
        estimator.copy({estimator.validationIndicatorCol: "held"}).fit(frame)


def test_rows_that_are_all_held_out_end_the_first_pass(spark, estimator, table):
    """A fit whose rows are all held out raises an error with the number of rows."""
    frame = table.withColumn("held", functions.lit(True))

    with pytest.raises(DataError, match="no rows to train on; the workers have 203 validation rows"):
        estimator.copy({estimator.validationIndicatorCol: "held"}).fit(frame)


@pytest.mark.whole
def test_vectors_of_an_array_are_what_they_were(spark, problem, table):
    """A column made by array_to_vector predicts as the array does."""
    made = table.withColumn("made", array_to_vector("array"))
    model = problem.model()

    first, second = (
        KerasTransformer(model=model, featuresCol=name).transform(made).orderBy("row").collect()
        for name in ("made", "array")
    )

    assert [row.probability for row in first] == [row.probability for row in second]


@pytest.mark.whole
def test_a_model_that_only_a_function_can_build_predicts_too(spark, problem, table):
    """If its layers have no get_config, executors build the model by the function, also to predict."""

    def build():
        import keras

        class Doubled(keras.layers.Layer):
            def __init__(self, factor):
                super().__init__()
                self.factor = factor

            def call(self, x):
                return self.factor * x

        inner = [keras.Input((6,)), Doubled(2.0), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential(inner)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    fitted = KerasEstimator(model=build, numWorkers=2, seed=1).fit(table)

    row = fitted.transform(table).orderBy("row").first()
    np.testing.assert_allclose(
        fitted.getModel().predict(problem.x[:1], verbose=0)[0], row.probability.toArray(), atol=1e-5
    )


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:You are saving a model that has not yet been built")
def test_a_model_that_is_not_built_yet_is_saved_trained_and_predicts_as_it_is(
    spark, problem, table, tmp_path
):
    """Saving leaves an unbuilt model trainable; a prediction builds it on the driver first."""
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    KerasEstimator(model=model).save(str(tmp_path / "unbuilt"))

    fitted = KerasEstimator(model=model, numWorkers=2, seed=1).fit(table)
    out = SparkModel(model).predict(table).orderBy("row").first()

    assert not np.isnan(weights_of(fitted)).any()
    np.testing.assert_allclose(model.predict(problem.x[:1], verbose=0)[0], out.prediction, atol=1e-5)
    model.fit(problem.x, problem.y, verbose=0)


@pytest.mark.whole
def test_each_fit_has_callbacks_of_its_own(spark, estimator, table):
    """Each fit sets its own model on the callbacks; a list that a callback keeps is the user's."""

    class Noting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.models = []

        def on_train_end(self, logs=None):
            self.models.append(self.model)

    noting = Noting()
    made = estimator.copy({estimator.callbacks: [noting], estimator.epochs: 1})

    fitted = [made.fit(table) for _ in range(2)]

    assert [each.getModel() for each in fitted] == noting.models
    assert noting.model is None


@pytest.mark.whole
def test_callbacks_that_watch_what_is_not_there_warn_here(estimator, table, tmp_path):
    """Without validation rows a callback on val_loss warns, as in Keras, and training continues."""
    watching = [
        keras.callbacks.EarlyStopping("val_loss"),
        keras.callbacks.ReduceLROnPlateau("val_loss"),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), "val_loss", save_best_only=True),
    ]

    with pytest.warns(UserWarning, match="val_loss") as caught:
        fitted = estimator.copy({estimator.callbacks: watching}).fit(table)

    said = " ".join(str(each.message) for each in caught)
    for words in (
        "Early stopping conditioned on",
        "Learning rate reduction is conditioned",
        "save best model",
    ):
        assert words in said
    assert 2 == fitted.summary.totalIterations


@pytest.mark.whole
@pytest.mark.classic
def test_a_row_with_a_weight_keeps_it(spark, problem):
    """A Row of features, label and weight is a tuple of three, whatever its fields are called."""
    from pyspark.sql import Row

    rows = [Row(features=x, label=int(y), weight=0.0) for x, y in zip(problem.x, problem.y, strict=True)]
    model = problem.model()
    before = model.get_weights()

    SparkModel(model, num_workers=2).fit(spark.sparkContext.parallelize(rows, 2), verbose=0)

    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
