"""Python processes that Spark keeps are bound to what they did first; a fit gets fresh ones where it must."""

import os

from sparkdl import SparkModel

ELSEWHERE = "elsewhere"


def bound(context):
    """Let the Python processes of all slots pass for such as have Keras on another backend, ever after."""

    def bind(rows):  # in here, so that it travels whole: executors have no tests
        import keras

        list(rows)
        keras.backend.backend = lambda: ELSEWHERE
        return [keras.backend.backend()]

    return context.parallelize(range(20), 2).mapPartitions(bind).collect() == [ELSEWHERE] * 2


def test_a_process_bound_to_another_backend_is_replaced(spark, problem):
    """The tasks run again in fresh processes: training and evaluation."""
    model, reference = problem.model(), problem.model()
    reference.fit(problem.x, problem.y, 64, 1, shuffle=False, verbose=0)
    spark_model = SparkModel(model, num_workers=2)

    assert bound(spark.sparkContext)
    history = spark_model.fit(problem.x, problem.y, 64, 1, shuffle=False, verbose=0)
    assert history.training["restarts"] == 0
    assert problem.distance(model, reference, problem.model().get_weights()) < 10
    assert bound(spark.sparkContext)
    assert spark_model.evaluate(problem.x, problem.y)[0] < 2


def processes(context):
    """Return the ids of the Python processes of all slots."""
    return set(context.parallelize(range(2), 2).barrier().mapPartitions(lambda _: [os.getpid()]).collect())


def test_data_that_is_new_leaves_them_alone(spark, problem):
    """The look at an RDD's first row costs no process what it has imported and compiled."""
    spark_model = SparkModel(problem.model(), num_workers=2)
    spark_model.fit(problem.x, problem.y, verbose=0)
    before = processes(spark.sparkContext)

    spark_model.fit(problem.rdd(spark, 102, 101), verbose=0)

    assert len(before) == 2
    assert before == processes(spark.sparkContext)
