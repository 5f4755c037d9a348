"""With preserve_partitions=True workers train on whole partitions; only the order within a worker changes."""

import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.data.batch_plan import BatchPlan, ranks
from sparkdl.errors import ConfigError, DataError
from sparkdl.ml import KerasEstimator

MASTERS = ("local", "local-cluster", "standalone")
SIZES = 40, 0, 63, 100  # the rows of each partition


def data_of(kind, spark, problem, sizes=SIZES):
    """Return the problem in partitions of these sizes, as an RDD or a DataFrame."""
    rdd = problem.rdd(spark, *sizes)
    if kind == "rdd":
        return rdd
    rows = rdd.map(lambda row: (row[0].tolist(), int(row[1])))
    return spark.createDataFrame(rows, "features array<float>, label bigint")


def plain(problem, rows, *, epochs, shuffle, batch_size=16):
    """Return a model that plain Keras trained in the row order of workers with ``rows`` rows each."""
    model = problem.model()
    first = np.cumsum([0, *rows[:-1]])
    for epoch in range(epochs):
        order = np.zeros(sum(rows), int)
        for worker in range(len(rows)):
            plan = BatchPlan(rows, worker, batch_size, 1, True, shuffle, 5)
            order[ranks(rows, worker)] = first[worker] + plan.order(epoch)[:]
        model.fit(problem.x[order], problem.y[order], batch_size=batch_size, shuffle=False, verbose=0)
    return model


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "sizes", "shuffle"),
    [
        ("rdd", (100, 103), True),
        ("rdd", SIZES, True),
        ("rdd", SIZES, False),
        ("frame", (100, 103), True),
        ("frame", SIZES, True),
    ],
)
def test_workers_have_whole_partitions_in_an_order_of_their_own(spark, problem, kind, sizes, shuffle):
    """Workers get neighbouring whole partitions and the weights of plain Keras on the same order of rows."""
    model, start = problem.model(), problem.model().get_weights()
    data = data_of(kind, spark, problem, sizes)

    history = SparkModel(model, num_workers=2).fit(
        data, batch_size=16, epochs=2, verbose=0, seed=5, shuffle=shuffle, preserve_partitions=True
    )

    rows = (sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    assert list(rows) == history.training["worker_rows"]
    assert problem.distance(model, plain(problem, rows, epochs=2, shuffle=shuffle), start) < 5


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["rdd", "frame"])
def test_rows_that_are_not_shuffled_stay_where_they_are(spark, problem, kind):
    """Unshuffled rows in as many partitions as workers stay where they are, whatever their sizes."""
    model, start = problem.model(), problem.model().get_weights()
    rows = 140, 63

    history = SparkModel(model, num_workers=2).fit(
        data_of(kind, spark, problem, rows), batch_size=16, epochs=2, verbose=0, shuffle=False
    )

    assert list(rows) == history.training["worker_rows"]
    assert problem.distance(model, plain(problem, rows, epochs=2, shuffle=False), start) < 5


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "most"), [("rdd", 1), ("frame", len(SIZES))])
def test_rows_that_are_shuffled_are_dealt_evenly(spark, problem, kind, most):
    """Shares of an RDD differ by one row at most, those of a DataFrame by one per partition."""
    data = data_of(kind, spark, problem, (41, 0, 61, 101))
    if kind == "frame" and not hasattr(data, "repartitionById"):
        pytest.skip("before Spark 4.1 rows of DataFrames are distributed at random")
    counts = [
        SparkModel(problem.model(), num_workers=2, frequency="epoch")
        .fit(data, batch_size=16, epochs=1, verbose=0, seed=5)
        .training["worker_rows"]
        for _ in range(2)
    ]

    assert counts[0] == counts[1]
    assert sum(counts[0]) == 203
    assert abs(counts[0][0] - counts[0][1]) <= most


@pytest.mark.whole
def test_rows_of_a_group_stay_together(spark, problem):
    """A DataFrame that is repartitioned by a column keeps each group on one worker."""
    frame = data_of("frame", spark, problem).repartition(3, "label")
    counts = [len(part) for part in frame.rdd.glom().collect()]
    estimator = KerasEstimator(model=problem.model(), numWorkers=2, preservePartitions=True)

    summary = estimator.fit(frame).summary
    held = estimator.setValidationSplit(0.2).fit(frame).summary

    assert any({count, 203 - count} == set(summary.training["worker_rows"]) for count in counts)
    assert 150 < held.training["rows"] < 180
    assert "val_loss" in held.history


def test_there_are_no_more_workers_than_partitions(spark, problem):
    """num_workers defaults to the number of partitions; more workers are refused before any job."""
    one = problem.rdd(spark, 203)

    history = SparkModel(problem.model()).fit(one, verbose=0, preserve_partitions=True)

    assert [203] == history.training["worker_rows"]
    for data in (one, data_of("frame", spark, problem, (203,))):
        with pytest.raises(ConfigError, match="got num_workers=2 and 1 partition. Use num_workers=1 or less"):
            SparkModel(problem.model(), num_workers=2).fit(data, preserve_partitions=True)


@pytest.mark.whole
def test_what_has_no_partitions_is_refused(spark, problem, jobs):
    """Data without partitions is refused by name; the error for a bad row names its worker."""
    fit = SparkModel(problem.model(), num_workers=2).fit
    rdd, before = problem.rdd(spark, *SIZES), jobs()
    cases = [
        ((problem.x, problem.y), {}, "needs an RDD or a DataFrame; got arrays"),
        ((lambda worker, num_workers: None,), {}, "needs an RDD or a DataFrame; got a function"),
        ((rdd,), {"validation_data": (problem.x, problem.y)}, "validation_data needs a shuffle .* Use val"),
        ((rdd,), {"preserve_partitions": 2}, "preserve_partitions should be True or False; got 2."),
    ]
    for data, arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            fit(*data, **{"preserve_partitions": True, **arguments})
    assert jobs() == before

    marked = problem.x[50, 0]
    shorter = rdd.map(lambda row: (row[0][:5], row[1]) if row[0][0] == marked else row)
    with pytest.raises(DataError, match=r"Expected x of shape \(6,\); row 10 of worker 1 has shape \(5,\)"):
        fit(shorter, verbose=0, preserve_partitions=True)


@pytest.mark.parametrize("kind", [int, pytest.param(float, marks=pytest.mark.whole)])
def test_workers_of_one_class_are_named(spark, problem, caplog, kind):
    """The driver warns when all rows of a worker are of one class, also if labels are doubles."""
    order = np.argsort(problem.y, kind="stable")
    pairs = [(problem.x[row], kind(problem.y[row])) for row in order]
    first = int((problem.y == 0).sum())
    parts = spark.sparkContext.parallelize([pairs[:first], pairs[first:]], 2).flatMap(lambda part: part)

    SparkModel(problem.model(), num_workers=2).fit(parts, verbose=0, preserve_partitions=True)

    assert "Workers with rows of only one class: [0]. Use shuffle=True without preserve" in "\n".join(
        caplog.messages
    )
