"""Terminal output of a failure with a known cause: the reason comes last, after little else."""

import os
import subprocess
import sys

import pytest

LINES = 20  # in all, including the startup output of TensorFlow and Spark
START = """
import keras
import numpy as np
from pyspark.sql import SparkSession, functions

import sparkdl
from sparkdl import Network, SparkModel

def build(loss="mse"):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return SparkModel(model, num_workers=2)

def refuse(*values):
    raise LookupError("no such picture")

session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
context, x, y = session.sparkContext, np.ones((8, 2)), np.ones(8)
frame = session.range(0, 8, 1, 2).selectExpr("array(double(id), 1D) as features", "double(id) as label", "id")
pairs = context.parallelize(list(zip(x, y)), 2)
refused = frame.withColumn("label", functions.udf(refuse, "double")("id"))
zero = frame.withColumn("label", functions.expr("1D / (id - 6)"))
bad = context.parallelize([*zip(x, y), (np.ones(3), 1.0)], 2)

class Loss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        if type(y_pred).__name__ != "EagerTensor":
            refuse()
        return keras.ops.mean(y_pred)
"""
FAILURES = {  # a statement, and the expected last line
    "an error of a worker": ("build(Loss()).fit(x, y, verbose=0)", "LookupError: no such picture (worker "),
    "a UDF of a DataFrame": ("build().fit(refused, verbose=0)", "LookupError: no such picture"),
    "a function of an RDD": ("build().evaluate(pairs.map(refuse))", "LookupError: no such picture"),
    "an expression": ("build().fit(zero, verbose=0)", "Division by zero"),
    "a bad row": (
        "build().fit(bad, verbose=0)",
        "sparkdl.errors.DataError: Expected x of shape (2,); row 4 of",
    ),
    "a stream": (
        'build().fit(session.readStream.format("rate").load(), features_col="value", label_col="value")',
        "sparkdl.errors.ConfigError: The DataFrame is a stream",
    ),
    "no slots": (
        "SparkModel(build().model, num_workers=9).fit(x, y)",
        "sparkdl.errors.ClusterError: num_workers=9 needs 9 slots",
    ),
    "no endpoint": (
        'SparkModel(build().model, network=Network(advertised_host="127.0.0.99")).fit(x, y, verbose=0)',
        "sparkdl.errors.PreflightError: Executor ",
    ),
    "a setting": ("build().fit(x, y, batch_size=0)", "sparkdl.errors.ConfigError: batch_size should be"),
    "a model": ("SparkModel(keras.Sequential())", "sparkdl.errors.ModelError: "),
    "a function of one's own": ("sparkdl.run(refuse)", "LookupError: no such picture (worker "),
    "another Python": (
        "context.pythonExec = '/bin/false'; build().fit(frame, verbose=0)",
        "sparkdl.errors.PreflightError: Executor ",
    ),
}
OFTEN = ("an error of a worker", "a UDF of a DataFrame")
KINDS = [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.whole) for kind in FAILURES]
pytestmark = pytest.mark.spark


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_line_is_the_reason(tmp_path, kind):
    """A failing script prints few lines, nothing of Spark's Java, and the reason at the end."""
    statement, reason = FAILURES[kind]
    script = tmp_path / "script.py"
    script.write_text(f"{START}\n{statement}\n")
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONWARNINGS": "ignore"}
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_CONNECT_MODE_ENABLED"):
        environment.pop(name, None)

    command, both = [sys.executable, script], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=environment, timeout=300, check=False, **both)

    shown = done.stdout.decode()
    lines = shown.strip().split("\n")  # Spark's progress bar returns to the start of its line
    assert 1 == done.returncode
    assert reason in lines[-1], shown[-4000:]
    assert "\tat org.apache" not in shown
    assert len(lines) <= LINES, shown
