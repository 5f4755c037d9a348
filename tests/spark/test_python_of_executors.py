"""Executors run the driver's Python by default; a configured Python that cannot work is refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl import SparkModel, predict_udf, run
from sparkdl.errors import PreflightError
from sparkdl.ml import KerasEstimator, KerasTransformer

PYTHONS = {  # shell commands, and the error that they cause
    "without packages": (f'exec {sys.executable} -S -P "$@"', "has no keras; the driver has keras"),
    "of another version": (
        'echo \'["3.8", "/old/python"]\'',
        "runs Python 3.8 (/old/python); the driver runs 3.",
    ),
    "that does not run": ("echo no such library >&2; exit 3", " as its Python: no such library. "),
    "without a word": ("exit 3", " as its Python: it exits with status 3. "),
    "that is missing": (None, "No such file or directory"),
}
DOORS = {
    "fit of arrays": lambda model, problem, rdd, frame: SparkModel(model).fit(problem.x, problem.y),
    "fit of an RDD": lambda model, problem, rdd, frame: SparkModel(model).fit(rdd),
    "fit of a DataFrame": lambda model, problem, rdd, frame: SparkModel(model).fit(frame),
    "fit of a function": lambda model, problem, rdd, frame: SparkModel(model).fit(lambda k, n: problem.x),
    "evaluate arrays": lambda model, problem, rdd, frame: SparkModel(model).evaluate(problem.x, problem.y),
    "evaluate a DataFrame": lambda model, problem, rdd, frame: SparkModel(model).evaluate(frame),
    "predict arrays": lambda model, problem, rdd, frame: SparkModel(model).predict(problem.x),
    "predict an RDD": lambda model, problem, rdd, frame: SparkModel(model).predict(rdd),
    "predict a DataFrame": lambda model, problem, rdd, frame: SparkModel(model).predict(frame),
    "predict_udf": lambda model, problem, rdd, frame: predict_udf(model),
    "KerasEstimator": lambda model, problem, rdd, frame: KerasEstimator(model=model).fit(frame),
    "KerasTransformer": lambda model, problem, rdd, frame: KerasTransformer(model=model).transform(frame),
    "run": lambda model, problem, rdd, frame: run(lambda worker: worker.rank),
}


def make(folder, commands):
    """Return the path of an executable with these shell commands."""
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def pairs(spark, problem, frames):
    """An RDD and a DataFrame made before sparkdl is imported."""
    return problem.rdd(spark, 100, 103), frames["array"]


@pytest.fixture
def no_job(jobs):
    """Assert after the test that it ran no Spark job."""
    before = jobs()
    yield
    assert jobs() == before


@pytest.mark.parametrize("door", DOORS)
def test_each_door_refuses_another_python_before_any_job(
    spark, problem, pairs, tmp_path, monkeypatch, no_job, door
):
    """Arrays, RDDs, DataFrames and functions are refused by the same error, before any job."""
    commands, message = PYTHONS["without packages"]
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(make(tmp_path, commands)))

    with pytest.raises(PreflightError) as caught:
        DOORS[door](problem.model(), problem, *pairs)

    assert message in str(caught.value)
    assert f"set PYSPARK_PYTHON={sys.executable} before Spark starts" in str(caught.value)


@pytest.mark.parametrize("kind", PYTHONS)
def test_what_is_wrong_with_a_python_is_named(spark, problem, tmp_path, monkeypatch, no_job, kind):
    """The error states why a Python cannot serve workers, and the remedy."""
    commands, message = PYTHONS[kind]
    path = make(tmp_path, commands) if commands else tmp_path / "none"
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(path))

    with pytest.raises(PreflightError) as caught:
        SparkModel(problem.model()).fit(problem.x, problem.y, verbose=0)

    assert message in str(caught.value)
    assert f"set PYSPARK_PYTHON={sys.executable} before Spark starts" in str(caught.value)


@pytest.mark.whole
def test_a_python_with_the_same_packages_is_taken(spark, problem, tmp_path, monkeypatch):
    """A wrapper of the driver's own Python is accepted."""
    path = make(tmp_path, f'exec {sys.executable} "$@"')
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(path))

    assert len(SparkModel(problem.model()).predict(problem.x)) == len(problem.x)


SCRIPT = """
import keras
import numpy as np
from pyspark.sql import SparkSession, functions
from sparkdl import SparkModel

def model():
    layers = [keras.Input((2,)), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return SparkModel(made, num_workers=1)

rows = [([1.0, 2.0], 1.0)] * 8
"""
OWN_SESSION = "print(model().fit(np.ones((8, 2)), np.ones(8), verbose=0).history)"
USERS_SESSION = """
session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
columns = "features array<double>, label double"
lists = session.sparkContext.parallelize(rows, 2)
cached, shuffled = lists.map(tuple).cache(), lists.map(lambda row: (0, row)).partitionBy(2).values()
frame = session.createDataFrame(rows, columns)
plus = functions.udf(lambda value: value + 1.0, "double")
for data in (lists, cached, shuffled, frame, frame.withColumn("label", plus("label"))):
    model().evaluate(data)
print(model().fit(frame, verbose=0).history)
print(model().predict(frame).count())
"""


@pytest.mark.whole
@pytest.mark.parametrize("session", [OWN_SESSION, USERS_SESSION], ids=["own session", "user's session"])
def test_a_script_needs_no_choice_of_a_python(tmp_path, session):
    """The first python3 on PATH is never started, not even for functions pickled before a fit."""
    make(tmp_path, "exit 3")
    script = Path(tmp_path, "script.py")
    script.write_text(SCRIPT + session)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV", "SPARK_CONNECT_MODE_ENABLED"):
        environment.pop(name, None)

    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )

    assert 0 == done.returncode, done.stderr[-4000:]
    assert "{'loss': [" in done.stdout
