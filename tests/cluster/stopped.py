"""An application that is stopped at some moments of calls; runs in its own process.

The arguments are a master, a mode, the names of moments, and settings of Spark. Prints a line of JSON: for
each moment the error of the call, and then the number of epochs of a fit in the next application, and the
remaining threads of sparkdl.
"""

import json
import os
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from pyspark.sql import SparkSession

import sparkdl
from sparkdl import Ensemble, SparkModel, tune
from sparkdl.scheduling import Scheduler

MASTER, MODE, *REST = sys.argv[1:]
MOMENTS = [each for each in REST if "=" not in each]
X = np.ones((64, 4), "float32")
Y = X[:, :1]


def session():
    """Start an application with the settings of the command line."""
    builder = SparkSession.builder.master(MASTER)
    for setting in REST:
        if "=" in setting:
            builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def stop_spark():
    """Stop the application if it runs."""
    if (running := SparkSession.getActiveSession()) is not None:
        running.stop()


class Stopping(keras.layers.Layer):
    """A layer that stops the application when it is serialized."""

    def call(self, inputs):
        return inputs

    def get_config(self):
        stop_spark()
        return super().get_config()


class StoppingFunction:
    """A function for workers that stops the application when it is pickled."""

    def __call__(self, worker):
        return worker.rank

    def __reduce__(self):
        stop_spark()
        return print, ()


def model_of(*layers):
    """Return a small model."""
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(epochs=1, *, workers=2, **callbacks):
    """Train a small model; return its results."""
    settings = {"epochs": epochs, "verbose": 0, "callbacks": [keras.callbacks.LambdaCallback(**callbacks)]}
    return SparkModel(model_of(), mode=MODE, num_workers=workers).fit(X, Y, **settings)


def stop_in_the_second_epoch(epoch, logs):
    """Stop the application from another thread, while the fit goes on."""
    if epoch == 1:
        threading.Thread(target=spark.stop).start()


def stop_at_once(logs):
    """Stop the application."""
    spark.stop()


def in_wait_for_executors():
    """Wait for a third executor, which does not come."""
    threading.Timer(4, spark.stop).start()
    fit(workers=3)


def build():
    """Stop the application and return a model for it."""
    spark.stop()
    return model_of()


def in_a_search():
    """Stop the application in the first of two trials."""
    callback = keras.callbacks.LambdaCallback(on_train_begin=stop_at_once)
    space = {"rate": [0.1, 0.2]}
    tune.search(
        lambda rate: model_of(), (X, Y), space, metric="loss", num_trials=2, verbose=0, callbacks=[callback]
    )


def in_the_scheduler():
    """Fit in a job of a scheduler."""
    with Scheduler() as scheduler:
        callback = keras.callbacks.LambdaCallback(on_train_begin=stop_at_once)
        job = scheduler.submit(SparkModel(model_of(), mode=MODE, num_workers=2), X, Y, callbacks=[callback])
        job.result()


def submitted_too_late():
    """Submit a job after the application was stopped."""
    scheduler = Scheduler()
    spark.stop()
    scheduler.submit(SparkModel(model_of(), mode=MODE, num_workers=2), X, Y).result()


def with_a_stopping_layer():
    """Return a SparkModel whose first serialization stops the application."""
    return SparkModel(model_of(Stopping()), num_workers=2, custom_objects={"Stopping": Stopping})


CALLS = {
    "in an epoch": lambda: fit(100_000, on_epoch_begin=stop_in_the_second_epoch),
    "in on_train_begin": lambda: fit(on_train_begin=stop_at_once),
    "in on_epoch_begin": lambda: fit(on_epoch_begin=lambda epoch, logs: spark.stop()),
    "in a wait for executors": in_wait_for_executors,
    "in evaluate": lambda: with_a_stopping_layer().evaluate(X, Y),
    "in predict": lambda: with_a_stopping_layer().predict(X),
    "in predict of an RDD": lambda: with_a_stopping_layer().predict(spark.sparkContext.parallelize(X, 2)),
    "in a search": in_a_search,
    "in an ensemble": lambda: Ensemble.fit(build, X, Y, num_members=2, settings={"num_workers": 1}),
    "in a job": in_the_scheduler,
    "before a job": submitted_too_late,
    "in run": lambda: sparkdl.run(StoppingFunction(), num_workers=2),
}
raised = {}
for moment in MOMENTS:
    spark, raised[moment] = session(), "nothing"
    try:
        CALLS[moment]()
    except Exception as error:  # noqa: BLE001 - every exception is reported
        raised[moment] = f"{type(error).__name__}: {error}"
left = [thread.name for thread in threading.enumerate() if "sparkdl" in thread.name]
spark = session()
report = {"raised": raised, "next": len(fit(2).history["loss"]), "threads": left}
sys.stdout.write(f"REPORT {json.dumps(report)}\n")
