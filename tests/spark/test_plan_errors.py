"""A failing user plan raises ConfigError or DataError with Spark's message, and is not retried."""

import sys

import keras
import numpy as np
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError
from sparkdl.ml import KerasEstimator

MASTERS = ("local", "connect")
ROWS, BAD = 40, 30  # in two partitions; the bad row is in the second


@pytest.fixture(scope="module", autouse=True)
def functions_by_value():
    """Pickle this module's functions by value: executors cannot import the tests."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="plan")
    made.compile("sgd", "mse")
    return made


def base(spark):
    columns = "array(cast(id as double), 1.0D) as features", "cast(id as double) as label", "id"
    return spark.range(0, ROWS, 1, 2).selectExpr(*columns)


def looked_up(value):
    if value == BAD:
        raise LookupError("no such picture")
    return float(value)


def of_pandas(batches):
    for batch in batches:
        if (batch["id"] == BAD).any():
            raise LookupError("no such picture")
        yield batch


def files_gone(spark, folder):
    base(spark).write.parquet(f"{folder}/rows")
    frame = spark.read.parquet(f"{folder}/rows")
    for path in (folder / "rows").glob("part-00001*"):
        path.unlink()
    return frame


def files_corrupt(spark, folder):
    base(spark).write.parquet(f"{folder}/rows")
    for path in (folder / "rows").glob("part-00001*"):
        path.write_bytes(b"x" * 200)
    for path in (folder / "rows").glob(".part-00001*"):
        path.unlink()  # its checksum
    return spark.read.schema(base(spark).schema).parquet(f"{folder}/rows")


def files_of_other_types(spark, folder):
    base(spark).write.parquet(f"{folder}/rows")
    strings = base(spark).selectExpr("features", "cast(id as string) as label", "id")
    strings.write.mode("append").parquet(f"{folder}/rows")
    return spark.read.schema(base(spark).schema).parquet(f"{folder}/rows")


def malformed(spark, folder):
    lines = ['{"a": 1.0, "label": 2.0}'] * ROWS + ["nonsense"]
    (folder / "rows.json").write_text("\n".join(lines))
    read = spark.read.schema("a double, label double").option("mode", "FAILFAST")
    return read.json(f"{folder}/rows.json").selectExpr("array(a, a) as features", "label")


def unassembled(spark, folder):
    from pyspark.ml.feature import VectorAssembler

    holes = base(spark).withColumn("hole", functions.expr(f"if(id = {BAD}, null, id)"))
    made = VectorAssembler(inputCols=["hole", "label"], outputCol="both").transform(holes)
    return made.selectExpr("both as features", "label")


def label(expression):
    return lambda spark, folder: base(spark).withColumn("label", functions.expr(expression))


def label_by(kind):
    return lambda spark, folder: base(spark).withColumn("label", kind(looked_up, "double")("id"))


def by_batches(function, kind):
    from pyspark.sql.functions import pandas_udf

    return pandas_udf(lambda values: values.map(function), kind)


FRAMES = {
    "a UDF": (label_by(functions.udf), "LookupError: no such picture"),
    "a cast": (label(f"double(if(id = {BAD}, 'x', '1'))"), "CAST_INVALID_INPUT"),
    "files that are gone": (files_gone, "does not exist"),
    "a pandas UDF": (label_by(by_batches), "LookupError: no such picture"),
    "mapInPandas": (
        lambda spark, folder: base(spark).mapInPandas(of_pandas, base(spark).schema),
        "LookupError: no such picture",
    ),
    "a division by zero": (label(f"1D / (id - {BAD})"), "[Dd]ivision by zero"),
    "raise_error": (label(f"if(id = {BAD}, double(raise_error('no such label')), label)"), "no such label"),
    "an index": (label(f"features[int(if(id = {BAD}, 7, 0))]"), "INVALID_ARRAY_INDEX"),
    "an overflow": (label("double(int(id * 100000000))"), "overflow"),
    "files that are corrupt": (files_corrupt, "is not a Parquet file|FAILED_READ_FILE"),
    "files of other types": (files_of_other_types, "label"),
    "malformed rows": (malformed, "(?i)malformed|nonsense"),
    "a stage that takes no nulls": (unassembled, "(?i)null"),
}
OFTEN = ("a UDF", "a cast", "files that are gone")
KINDS = [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.whole) for kind in FRAMES]


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_fails_is_told_in_sparks_words(spark, tmp_path, kind):
    """A failing plan reports Spark's error, not a dead worker, in fit and evaluate; weights are unchanged."""
    make, words = FRAMES[kind]
    frame, spark_model = make(spark, tmp_path), SparkModel(model(), num_workers=2)
    start = spark_model.model.get_weights()

    for door in (lambda: spark_model.fit(frame, verbose=0), lambda: spark_model.evaluate(frame)):
        with pytest.raises(DataError, match=words) as caught:
            door()
        assert "died" not in str(caught.value)
        assert caught.value.cause is not None
        assert len(str(caught.value).splitlines()) <= 12
    assert all(np.array_equal(a, b) for a, b in zip(start, spark_model.model.get_weights(), strict=True))


def test_what_an_estimator_is_given_is_told_in_the_same_way(spark, tmp_path):
    """An Estimator reports a failing plan in the same way."""
    make, words = FRAMES["a cast"]

    with pytest.raises(DataError, match=words):
        KerasEstimator(model=model(), numWorkers=2).fit(make(spark, tmp_path))


def test_a_stream_is_refused_before_any_job(spark, jobs):
    """A streaming DataFrame is refused before any job; the error points to foreachBatch."""
    rates = spark.readStream.format("rate").load()
    stream = rates.selectExpr("array(value, value) as features", "value as label")
    frame, spark_model = base(spark), SparkModel(model(), num_workers=1)
    before = jobs()

    for door in (
        lambda: spark_model.fit(stream, verbose=0),
        lambda: spark_model.evaluate(stream),
        lambda: KerasEstimator(model=model()).fit(stream),
    ):
        with pytest.raises(ConfigError, match="is a stream, .*foreachBatch"):
            door()
    assert jobs() == before
    with pytest.raises(ConfigError, match="is a stream, .*foreachBatch"):
        spark_model.fit(frame, validation_data=stream, verbose=0)


@pytest.mark.apart
def test_a_column_that_spark_connect_misses_later_is_told(spark):
    """A missing column raises ConfigError, which Spark Connect detects only when it analyzes the plan."""
    frame = base(spark).select("features", functions.col("no_such_column").alias("label"))

    for door in (SparkModel(model()).fit, SparkModel(model()).evaluate):
        with pytest.raises(ConfigError, match="no_such_column"):
            door(frame)


def pairs(spark):
    return spark.sparkContext.parallelize([(np.ones(2), float(k)) for k in range(ROWS)], 2)


def stopping(rows):
    for count, row in enumerate(rows):
        if count == 15:
            raise LookupError("no such picture")
        yield row


RDDS = {
    "a function": lambda spark: pairs(spark).map(lambda pair: (pair[0], looked_up(pair[1]))),
    "a generator": lambda spark: pairs(spark).mapPartitions(stopping),
    "a shuffle": lambda spark: (
        pairs(spark).map(lambda pair: (pair[1], (pair[0], looked_up(pair[1])))).partitionBy(2).values()
    ),
    "rows of a DataFrame": lambda spark: label_by(functions.udf)(spark, None).rdd.map(
        lambda row: (np.array(row.features), row.label)
    ),
}


@pytest.mark.one_case
@pytest.mark.classic
@pytest.mark.parametrize("kind", RDDS)
def test_a_function_of_an_rdd_that_raises_is_an_error_of_the_rows(spark, kind):
    """The error begins with the exception of the RDD's function and shows the line that raised it."""
    rdd, spark_model = RDDS[kind](spark), SparkModel(model(), num_workers=2)

    for door in (lambda: spark_model.fit(rdd, verbose=0), lambda: spark_model.evaluate(rdd)):
        with pytest.raises(DataError, match="could not .*compute.*: LookupError: no such picture") as caught:
            door()
        assert 'raise LookupError("no such picture")' in str(caught.value)
        assert "test_plan_errors.py" in caught.value.traceback


@pytest.mark.classic
def test_a_file_of_an_rdd_that_is_missing_is_named(spark, tmp_path):
    """A missing file of an RDD is named; Spark looks for it when it counts the partitions."""
    rdd = spark.sparkContext.textFile(f"{tmp_path}/none").map(lambda line: (np.ones(2), 1.0))

    with pytest.raises(DataError, match=f"path does not exist: file:{tmp_path}/none"):
        SparkModel(model(), num_workers=1).fit(rdd, verbose=0)


@pytest.mark.whole
@pytest.mark.classic
def test_a_function_of_rows_that_raises_is_an_error_of_the_rows(spark):
    """An exception in a rows function is a DataError, raised at once or later on a worker."""

    def later(worker, num_workers):
        yield np.ones((4, 2)), np.ones(4)
        raise LookupError("no such picture")

    def at_once(worker, num_workers):
        raise LookupError("no such picture")

    for function in (at_once, later):
        with pytest.raises(DataError, match=r"of worker \d could not be computed: LookupError: no such pict"):
            SparkModel(model(), num_workers=2).fit(function, verbose=0)
