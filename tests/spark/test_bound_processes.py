"""Python workers that Spark reuses keep their Keras backend and GPU; a fit replaces them where it must."""

import os

import pytest

from sparkdl import SparkModel

ELSEWHERE = "elsewhere"


def bound(context):
    """Make the Python workers of all slots pass for ones with Keras on another backend."""

    # nested, so that it is pickled by value: executors cannot import the tests
    def bind(rows):
        import keras

        list(rows)
        keras.backend.backend = lambda: ELSEWHERE
        return [keras.backend.backend()]

    return context.parallelize(range(20), 2).mapPartitions(bind).collect() == [ELSEWHERE] * 2


@pytest.mark.whole
def test_a_process_bound_to_another_backend_is_replaced(spark, problem):
    """Training and evaluation run their tasks again in fresh processes if the backend does not match."""
    model, reference = problem.model(), problem.model()
    reference.fit(problem.x, problem.y, 64, 1, shuffle=False, verbose=0)
    spark_model = SparkModel(model, num_workers=2)

    assert bound(spark.sparkContext)
    history = spark_model.fit(problem.x, problem.y, 64, 1, shuffle=False, verbose=0)
    assert history.training["restarts"] == 0
    assert problem.distance(model, reference, problem.model().get_weights()) < 10
    assert bound(spark.sparkContext)
    assert spark_model.evaluate(problem.x, problem.y)[0] < 2


def bound_to_a_gpu(context):
    """Make the Python workers of all slots, with Keras imported, pass for ones bound to a GPU."""

    def bind(rows):
        import keras  # noqa: F401

        from sparkdl.worker import devices

        list(rows)
        devices._bound = ("9",)
        return [os.getpid()]

    return set(context.parallelize(range(20), 2).mapPartitions(bind).collect())


@pytest.mark.whole
def test_a_process_bound_to_another_gpu_is_replaced(spark, problem, monkeypatch):
    """Tasks take turns on the visible GPUs, each in a process that has seen no other GPU.

    On a cluster, GPUs are assigned by Spark or not at all, and a process stays as it is.
    """
    local = spark.sparkContext.master.startswith("local[")
    monkeypatch.setitem(spark.sparkContext.environment, "CUDA_VISIBLE_DEVICES", "3,1")
    spark_model = SparkModel(problem.model(), num_workers=2)
    before = bound_to_a_gpu(spark.sparkContext)

    fits = [spark_model.fit(problem.x, problem.y, 64, 1, verbose=0).training for _ in range(2)]

    assert [[["3"], ["1"]] if local else [[], []]] * 2 == [fit["gpus"] for fit in fits]
    assert [0, 0] == [fit["restarts"] for fit in fits]
    after = processes(spark.sparkContext)
    assert (set() if local else before) == before & after
    assert 203 == spark_model.predict(problem.rdd(spark, 50, 50, 50, 53)).count()
    # predictions run in these processes, whatever the number of a partition
    assert after == processes(spark.sparkContext)


def processes(context):
    """Return the process ids of the Python workers of all slots."""
    return set(context.parallelize(range(2), 2).barrier().mapPartitions(lambda _: [os.getpid()]).collect())


@pytest.mark.whole
def test_data_that_is_new_leaves_them_alone(spark, problem):
    """Reading the first row of a new RDD does not replace the warm Python workers."""
    spark_model = SparkModel(problem.model(), num_workers=2)
    spark_model.fit(problem.x, problem.y, verbose=0)
    before = processes(spark.sparkContext)

    spark_model.fit(problem.rdd(spark, 102, 101), verbose=0)

    assert len(before) == 2
    assert before == processes(spark.sparkContext)
