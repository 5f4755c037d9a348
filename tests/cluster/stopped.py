"""A job whose application is stopped during a fit; runs in its own process.

Prints a line of JSON: the error of the fit, the number of epochs of a fit in the next application, and the
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

from sparkdl import SparkModel
from sparkdl.errors import SparkDLError


def session():
    """Start an application with the settings of the command line."""
    builder = SparkSession.builder.master(sys.argv[1])
    for setting in sys.argv[3:]:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def fit(epochs, **callbacks):
    """Train a small model; return its results."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    settings = {"epochs": epochs, "verbose": 0, "callbacks": [keras.callbacks.LambdaCallback(**callbacks)]}
    x = np.ones((64, 4), "float32")
    return SparkModel(model, mode=sys.argv[2], num_workers=2).fit(x, x[:, :1], **settings)


spark, raised = session(), "nothing"
stopping = threading.Thread(target=spark.stop)


def stop(epoch, logs):
    """Stop the application in the second epoch."""
    if epoch == 1:
        stopping.start()


try:
    fit(100_000, on_epoch_begin=stop)
except SparkDLError as error:
    raised = f"{type(error).__name__}: {error}"
left = [thread.name for thread in threading.enumerate() if "sparkdl" in thread.name]
spark = session()
report = {"raised": raised, "next": len(fit(2).history["loss"]), "threads": left}
sys.stdout.write(f"REPORT {json.dumps(report)}\n")
