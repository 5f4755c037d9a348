"""Over Spark Connect a client has sessions and DataFrames, no SparkContext, and the same answers."""

import numpy as np
import pytest

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ConfigError
from sparkdl.ml import KerasTransformer

MASTERS = ("connect",)


@pytest.fixture(scope="session")
def table(spark, problem):
    """The problem's rows, features in an array."""
    rows = [(row, x.tolist(), int(y)) for row, (x, y) in enumerate(zip(problem.x, problem.y, strict=True))]
    frame = spark.createDataFrame(rows, "row long, features array<float>, label long")
    return frame.repartition(3, "row").cache()


def test_predictions_are_those_of_keras(spark, problem, table):
    """By SparkModel, by a Transformer and in SQL, whose model travels as a file of the session."""
    model = problem.model()
    expected = model.predict(problem.x, verbose=0)

    spark.udf.register("score", predict_udf(model, batch_size=50))
    table.createOrReplaceTempView("points")
    found = {
        "SparkModel": SparkModel(model).predict(table, output_col="p"),
        "Transformer": KerasTransformer(model=model, probabilityCol="p").transform(table),
        "SQL": spark.sql("SELECT row, score(features) AS p FROM points"),
    }

    for way, frame in found.items():
        rows = sorted(frame.select("row", "p").collect())
        np.testing.assert_allclose(expected, [list(row.p) for row in rows], atol=1e-5, err_msg=way)


def test_an_evaluation_is_that_of_keras(problem, table):
    """Loss and metrics over all rows."""
    model = problem.model()

    found = SparkModel(model).evaluate(table)

    np.testing.assert_allclose(model.evaluate(problem.x, problem.y, verbose=0), found, rtol=1e-5)


def test_rows_that_go_as_an_rdd_are_refused_by_name(spark, problem):
    """What a client cannot send says what to pass in its place."""
    spark_model = SparkModel(problem.model())

    for call in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigError, match=r"rows should be a DataFrame; got arrays\. .*createDataFrame"):
            call(problem.x, problem.y)
    with pytest.raises(ConfigError, match="rows should be a DataFrame; got arrays"):
        spark_model.predict(problem.x)
    with pytest.raises(ConfigError, match="rows should be a DataFrame; got a function"):
        spark_model.fit(lambda worker, workers: (problem.x, problem.y))
