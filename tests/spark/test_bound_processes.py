"""Python processes that Spark keeps are bound to what they did first; a fit gets fresh ones where it must."""

from sparkdl import SparkModel

ELSEWHERE = "elsewhere"


def bind(rows):
    """Let this Python process pass for one that has Keras on another backend, as it does ever after."""
    import keras

    list(rows)
    keras.backend.backend = lambda: ELSEWHERE
    return [keras.backend.backend()]


def bound(context):
    """Bind the Python processes of all slots."""
    rows = context.parallelize(range(20), 2)
    return rows.mapPartitions(bind).collect() == [ELSEWHERE] * 2


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
