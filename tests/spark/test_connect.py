"""Over Spark Connect a client has sessions and DataFrames, no SparkContext, and the same answers."""

import keras
import numpy as np
import pytest
from pyspark import TaskContext

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ClusterError, ConfigError, PreflightError, WorkerError
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


def test_rows_that_go_as_an_rdd_are_refused_by_name(spark, problem, table):
    """What a client cannot send, or cannot know, says what to do in its place."""
    spark_model = SparkModel(problem.model())

    for call in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigError, match=r"rows should be a DataFrame; got arrays\. .*createDataFrame"):
            call(problem.x, problem.y)
    with pytest.raises(ConfigError, match="rows should be a DataFrame; got arrays"):
        spark_model.predict(problem.x)
    with pytest.raises(ConfigError, match="rows should be a DataFrame; got a function"):
        spark_model.fit(lambda worker, workers: (problem.x, problem.y))
    with pytest.raises(ConfigError, match=r"preserve_partitions=True needs to know .* Leave it out"):
        spark_model.fit(table, preserve_partitions=True)


def test_a_fit_with_callbacks_gives_the_answer_of_keras(problem, table):
    """The endpoint is in the client: callbacks run here, change the learning rate, stop the workers."""

    class Slower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.3 / (epoch + 2)
            self.model.stop_training = epoch == 2

    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    history = SparkModel(model, num_workers=2).fit(
        table, batch_size=203, epochs=9, verbose=0, callbacks=[Slower()]
    )

    expected = reference.fit(problem.x, problem.y, batch_size=203, epochs=3, verbose=0, callbacks=[Slower()])
    assert problem.distance(model, reference, start) <= 1
    assert expected.history["loss"] == pytest.approx(history.history["loss"], rel=1e-5)


def test_after_a_callback_that_raises_all_slots_are_free(spark, problem, table):
    """The job is cancelled by its tag: the next fit needs all three slots."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise LookupError("the disk is full")

    spark_model = SparkModel(problem.model())

    with pytest.raises(LookupError, match="the disk is full"):
        spark_model.fit(table, epochs=5, verbose=0, callbacks=[Fail()])

    assert [] == spark.interruptAll()
    assert 3 == spark_model.fit(table, validation_split=0.2, verbose=0).training["workers"]


def test_a_job_that_somebody_interrupts_ends_the_fit_by_name(spark, problem, table):
    """It is not started again."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            spark.interruptAll()

    with pytest.raises(ClusterError, match="Somebody cancelled the Spark job of this fit"):
        SparkModel(problem.model(), num_workers=2).fit(table, epochs=99, verbose=0, callbacks=[Interrupt()])


def test_a_worker_that_fails_or_cannot_reach_the_client_says_so(problem, table):
    """A traceback comes through the endpoint, and what the preflight found through Spark."""

    def refuse(y, predicted):
        if TaskContext.get() is not None:
            raise RuntimeError("no such loss")
        return keras.losses.sparse_categorical_crossentropy(y, predicted)

    with pytest.raises(WorkerError, match="no such loss"):
        SparkModel(problem.model(loss=refuse), num_workers=1).fit(table, verbose=0)
    with pytest.raises(PreflightError, match=r"cannot reach .* 127\.0\.0\.9:\d+ .* advertised_host="):
        SparkModel(problem.model(), num_workers=1, advertised_host="127.0.0.9").fit(table, verbose=0)
