"""A job whose first statement is a fit; runs in its own process, because it needs its own settings.

Prints one line of JSON: the workers, GPUs, rows, losses and messages, and the distance of the weights from
plain Keras's.
"""

import json
import logging
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import SparkModel
from sparkdl.driver import worker_group


class Centered(keras.layers.Layer):
    """A layer of ``__main__``, as in notebooks; the executors have a different ``__main__``."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=-1, keepdims=True)


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), Centered(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


builder = SparkSession.builder.master(sys.argv[1])
for setting in sys.argv[3:]:
    builder = builder.config(*setting.split("=", 1))
context = builder.getOrCreate().sparkContext
# Without Spark's log, an error of the fit is the last line printed.
context.setLogLevel("OFF")
mode = sys.argv[2]
x = np.random.default_rng(0).normal(size=(90, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)

worker_group.NOTICE_SECONDS = 0.2  # short waits are logged too
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("sparkdl").addHandler(handler)
logging.getLogger("sparkdl").setLevel(logging.INFO)
model, reference = build(), build()
share = context.getConf().get("spark.shareGpus") == "true"
spark_model = SparkModel(model, mode=mode, num_workers=2, share_gpus=share)
history = spark_model.fit(x, y, epochs=3, shuffle=False, verbose=0)

reference.fit(x, y, epochs=3, shuffle=False, verbose=0)
away = max(np.abs(a - b).max() for a, b in zip(model.get_weights(), reference.get_weights(), strict=True))
report = {
    "gpus": history.training["gpus"],
    "workers": history.training["workers"],
    "worker_rows": history.training["worker_rows"],
    "restarts": history.training["restarts"],
    "loss": history.history["loss"],
    "away": float(away),
    "messages": messages,
}
print("REPORT " + json.dumps(report))  # noqa: T201 - the script's output
