"""Workers have equal numbers of training rows, give or take one, wherever rows are shuffled."""

import pytest
from pyspark.sql import functions

from sparkdl import SparkModel
from sparkdl.spark.application import SparkApplication

MASTERS = ("local", "local-cluster", "connect")
ROWS, WORKERS = 203, 2


def data_of(kind, spark, problem):
    """Return the problem in partitions of different sizes, and the number of its training rows."""
    if kind == "rdd":
        return problem.rdd(spark, 40, 0, 63, 100)
    rows = zip(range(ROWS), problem.x.tolist(), problem.y.tolist(), strict=True)
    frame = spark.createDataFrame(rows, "row int, features array<float>, label bigint")
    sizes = functions.when(functions.col("row") < 5, 0).when(functions.col("row") < 50, 1).otherwise(2)
    return frame.repartition(7, sizes).withColumn("held", functions.col("row") % 10 == 7)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["frame", "split", "indicator", "hashed", "rdd"])
def test_shares_of_shuffled_rows_differ_by_one_at_most(spark, problem, monkeypatch, kind):
    """Shares of shuffled rows differ by one at most, also with held-out rows and before Spark 4.1."""
    if kind == "rdd" and not hasattr(spark, "sparkContext"):
        pytest.skip("there are no RDDs over Spark Connect")
    data = data_of(kind, spark, problem)
    options = {"split": {"validation_split": 0.3}, "indicator": {"validation_indicator_col": "held"}}
    if kind == "hashed":
        monkeypatch.setattr(SparkApplication, "places_rows", False)

    model = SparkModel(problem.model(), mode="asynchronous", num_workers=WORKERS)
    history = model.fit(data, epochs=1, batch_size=16, verbose=0, **options.get(kind, {}))
    rows = history.training["worker_rows"]

    assert max(rows) - min(rows) <= 1
    assert sum(rows) == ROWS - (20 if kind == "indicator" else 0) or kind == "split"
    assert 110 < sum(rows)
