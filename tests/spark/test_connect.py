"""Over Spark Connect, a client without a SparkContext gets the same results from its DataFrames."""

import ssl
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from pyspark import TaskContext

from sparkdl import Network, SparkModel, predict_udf, run
from sparkdl.driver import remote_server
from sparkdl.errors import ClusterError, ConfigError, DivergedError, PreflightError, WorkerError
from sparkdl.ml import KerasTransformer
from sparkdl.tfrecords import write_tfrecords

MASTERS = ("connect",)


@pytest.fixture(scope="session")
def table(spark, problem):
    """The problem's rows, with the features in an array column."""
    rows = [(row, x.tolist(), int(y)) for row, (x, y) in enumerate(zip(problem.x, problem.y, strict=True))]
    frame = spark.createDataFrame(rows, "row long, features array<float>, label long")
    return frame.repartition(3, "row").cache()


def threads_of_ours(spark):
    """Return the names of sparkdl's threads in Spark's Python workers."""

    def look(batches):
        for batch in batches:
            names = [each.name for each in threading.enumerate() if each.name.startswith("sparkdl-")]
            yield type(batch).from_pydict({"name": names})

    return spark.range(3, numPartitions=3).mapInArrow(look, "name string").collect()


def test_predictions_are_those_of_keras(spark, problem, table):
    """SparkModel, a Transformer and SQL predict as Keras does; the model travels as a file of the session."""
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


@pytest.mark.whole
def test_an_evaluation_is_that_of_keras(problem, table):
    """Loss and metrics over all rows are those of Keras."""
    model = problem.model()

    found = SparkModel(model).evaluate(table)

    np.testing.assert_allclose(model.evaluate(problem.x, problem.y, verbose=0), found, rtol=1e-5)


def test_rows_that_go_as_an_rdd_are_refused_by_name(spark, problem, table):
    """A call that needs an RDD or a SparkContext raises a ConfigError that names the alternative."""
    spark_model = SparkModel(problem.model())

    for call in (spark_model.fit, spark_model.evaluate):
        with pytest.raises(ConfigError, match=r"rows should be a DataFrame; got arrays\. .*createDataFrame"):
            call(problem.x, problem.y)
    with pytest.raises(ConfigError, match="rows should be a DataFrame; got arrays"):
        spark_model.predict(problem.x)
    with pytest.raises(ConfigError, match="rows should be a DataFrame; got a function"):
        spark_model.fit(lambda worker, workers: (problem.x, problem.y))
    with pytest.raises(
        ConfigError, match=r"preserve_partitions=True needs the number of partitions, .* Leave"
    ):
        spark_model.fit(table, preserve_partitions=True)
    for call in (lambda: run(lambda worker: worker.rank), lambda: write_tfrecords(table, "/tmp/records")):
        with pytest.raises(ConfigError, match="needs a SparkContext, .* Use a classic SparkSession"):
            call()
    with pytest.raises(ConfigError, match="path should be an absolute path on .* got 'file:///stage'"):
        KerasTransformer(model=problem.model()).save("file:///stage")


@pytest.mark.whole
@pytest.mark.parametrize("placement", ["driver", "worker"])
def test_a_fit_with_callbacks_gives_the_answer_of_keras(problem, table, placement):
    """Callbacks on the client change the learning rate and stop the workers, wherever the endpoint runs.

    If it runs in worker 0, the client reaches it by small jobs in the third slot.
    """

    class Slower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.3 / (epoch + 2)
            self.model.stop_training = epoch == 2

    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    history = SparkModel(model, num_workers=2, placement=placement).fit(
        table, batch_size=203, epochs=9, verbose=0, callbacks=[Slower()]
    )

    expected = reference.fit(problem.x, problem.y, batch_size=203, epochs=3, verbose=0, callbacks=[Slower()])
    assert problem.distance(model, reference, start) <= 1
    assert expected.history["loss"] == pytest.approx(history.history["loss"], rel=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize(("placement", "num_workers"), [("driver", 2), ("worker", 2), ("worker", 3)])
def test_a_joint_start_gives_the_same_weights_as_two_fits(problem, table, placement, num_workers):
    """frequency="auto" switches wherever the endpoint runs, also without a slot for the driver's requests."""
    weights, settings = [], {"num_workers": num_workers, "placement": placement}
    fit = {"batch_size": 8, "epochs": 3, "seed": 3, "verbose": 0}
    model = problem.model()
    history = SparkModel(model, frequency="auto", **settings).fit(table, **fit)
    weights.append(model.get_weights())
    model = problem.model()
    SparkModel(model, **settings).fit(table, **fit | {"epochs": 1})
    SparkModel(model, frequency=16, merge="diloco", **settings).fit(table, initial_epoch=1, **fit)
    weights.append(model.get_weights())

    assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
    assert 1 == history.training["joint_start"]["epochs"]
    assert [0, 1, 2] == history.epoch
    for name in ("version", "bytes_received"):
        assert history.training[name] > history.training["joint_start"][name] > 0


@pytest.mark.whole
def test_batch_hooks_stop_an_epoch_whose_endpoint_is_in_worker_0(problem, table):
    """Batch reports reach the client by small jobs, and stop_training reaches the workers."""
    batches = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append((batch, logs["loss"]))
            self.model.stop_training = len({loss for _, loss in batches}) > 1

    saver = keras.callbacks.ModelCheckpoint("never.keras", save_freq=3)
    spark_model = SparkModel(problem.model(keras.optimizers.SGD(0.01)), num_workers=2, placement="worker")
    with pytest.raises(
        ConfigError, match=r'ModelCheckpoint\(save_freq=3\) .*"driver" or "executors".* Set save_freq="epoch"'
    ):
        spark_model.fit(table, callbacks=[saver], verbose=0)
    history = spark_model.fit(
        table, batch_size=1, epochs=2, steps_per_epoch=1_000_000, verbose=0, callbacks=[Stop()]
    )

    assert [0] == history.epoch
    assert list(range(len(batches))) == [batch for batch, _ in batches]


@pytest.mark.whole
def test_worker_0_makes_a_certificate(problem, table, monkeypatch):
    """Worker 0 makes a TLS certificate; the other workers and the client's jobs get it from Spark."""
    endpoints, certificates, find = [], [], remote_server.endpoint_at

    def endpoint_at(*given):
        endpoints.append(find(*given))
        return endpoints[-1]

    def peek(epoch, logs):
        shown = ssl.get_server_certificate((endpoints[0].host, endpoints[0].port), timeout=20)
        certificates.append(ssl.PEM_cert_to_DER_cert(shown))

    monkeypatch.setattr(remote_server, "endpoint_at", endpoint_at)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=peek)
    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    SparkModel(model, num_workers=2, placement="worker", network=Network(tls=True)).fit(
        table, batch_size=203, epochs=2, verbose=0, callbacks=[callback]
    )

    reference.fit(problem.x, problem.y, batch_size=203, epochs=2, verbose=0)
    assert problem.distance(model, reference, start) <= 1
    assert [endpoints[0].certificate] * 2 == certificates


@pytest.mark.whole
def test_an_endpoint_in_a_worker_evaluates_what_callbacks_swap_in(problem, table):
    """Validation waits for the driver's callbacks, which may swap in other weights."""
    ours, reference = (
        problem.model(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.9)) for _ in range(2)
    )
    settings = {"batch_size": 203, "epochs": 2, "verbose": 0}
    histories = [
        model.fit(*data, validation_data=held, callbacks=[keras.callbacks.SwapEMAWeights(True)], **settings)
        for model, data, held in (
            (SparkModel(ours, num_workers=2, placement="worker"), (table,), table),
            (reference, (problem.x, problem.y), (problem.x, problem.y)),
        )
    ]

    for name, values in histories[1].history.items():
        assert values == pytest.approx(histories[0].history[name], rel=1e-5), name


@pytest.mark.whole
@pytest.mark.parametrize("placement", ["driver", "worker"])
def test_after_a_callback_that_raises_all_slots_are_free(spark, problem, table, placement):
    """A callback that raises cancels the job by its tag, so the next fit finds all three slots free."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise LookupError("the disk is full")

    workers = {"driver": 3, "worker": 2}[placement]

    with pytest.raises(LookupError, match="the disk is full"):
        SparkModel(problem.model(), num_workers=workers, placement=placement).fit(
            table, epochs=5, verbose=0, callbacks=[Fail()]
        )

    assert [] == spark.interruptAll()
    again = SparkModel(problem.model(), placement=placement).fit(table, validation_split=0.2, verbose=0)
    assert 3 == again.training["workers"]


def test_a_job_that_somebody_interrupts_ends_the_fit_by_name(spark, problem, table):
    """A job that is interrupted ends the fit with a ClusterError and is not restarted."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            spark.interruptAll()

    with pytest.raises(ClusterError, match="The Spark job was cancelled"):
        SparkModel(problem.model(), num_workers=2).fit(table, epochs=9999, verbose=0, callbacks=[Interrupt()])


@pytest.mark.whole
def test_checkpoints_are_kept_on_the_machine_of_the_client(problem, table, tmp_path):
    """Checkpoints go to the client's disk; a Hadoop URI is refused with the alternative."""
    spark_model = SparkModel(problem.model(), num_workers=1)
    folder, options = tmp_path / "run", {"resume": True, "verbose": 0}

    with pytest.raises(ConfigError, match="A client of Spark Connect never has a SparkContext; use a path"):
        spark_model.fit(table, checkpoint=folder.as_uri(), **options)
    for epochs in (1, 2):
        history = spark_model.fit(table, epochs=epochs, checkpoint=str(folder), **options)
    assert (1, [0, 1]) == (history.training["resumed"], history.epoch)


@pytest.mark.whole
def test_a_worker_that_fails_or_cannot_reach_the_client_says_so(problem, table):
    """A worker's traceback reaches the client through the endpoint, a preflight failure through Spark."""

    def refuse(y, predicted):
        if TaskContext.get() is not None:
            raise RuntimeError("no such loss")
        return keras.losses.sparse_categorical_crossentropy(y, predicted)

    for options in ({}, {"placement": "worker"}):
        with pytest.raises(WorkerError, match="no such loss"):
            SparkModel(problem.model(loss=refuse), num_workers=1, **options).fit(table, verbose=0)
    with pytest.raises(PreflightError, match=r"cannot reach .* 127\.0\.0\.9:\d+ .* advertised_host="):
        SparkModel(problem.model(), num_workers=1, network=Network(advertised_host="127.0.0.9")).fit(
            table, verbose=0
        )


@pytest.mark.whole
def test_a_run_that_diverges_says_so_from_worker_0(problem, table):
    """The endpoint in worker 0 reports divergence to the client."""
    model = problem.model(keras.optimizers.SGD(1e30))

    with pytest.raises(DivergedError, match="Training diverged"):
        SparkModel(model, mode="asynchronous", merge="sum", num_workers=3, placement="worker").fit(
            table, batch_size=4, epochs=20, verbose=0
        )


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_without_a_spare_slot_the_run_comes_with_the_result(spark, problem, table, mode):
    """Without a spare slot, the results come at the end and equal those of any fit; callbacks are refused."""
    model, reference = problem.model(), problem.model()
    start = model.get_weights()
    spark_model = SparkModel(model, mode=mode, num_workers=3, placement="worker")

    with pytest.raises(
        ConfigError, match=r"callbacks \(EarlyStopping\) need Spark 4.1 or newer .* num_workers=2"
    ):
        spark_model.fit(table, callbacks=[keras.callbacks.EarlyStopping("loss")])
    history = spark_model.fit(table, batch_size=203, epochs=3, verbose=0, validation_split=0.2, seed=1)

    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(history.history)
    assert [3] * 4 == [len(values) for values in history.history.values()]
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert 3 == len(history.training["worker_rows"])
    found = spark_model.evaluate(table, return_dict=True)
    assert found["loss"] == pytest.approx(model.evaluate(problem.x, problem.y, verbose=0)[0], rel=1e-4)
    assert [] == threads_of_ours(spark)
    if mode == "synchronous":
        SparkModel(reference, num_workers=3).fit(
            table, batch_size=203, epochs=3, verbose=0, validation_split=0.2, seed=1
        )
        assert problem.distance(model, reference, start) <= 1


@pytest.mark.whole
def test_the_doctor_checks_a_server(spark):
    """``python -m sparkdl doctor`` passes all checks over Spark Connect."""
    server = f"sc://127.0.0.1:{spark.conf.get('spark.connect.grpc.binding.port')}"
    command = [sys.executable, "-m", "sparkdl", "doctor", "--master", server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert 0 == done.returncode, done.stdout
    assert done.stdout.endswith("A fit works here.\n")
