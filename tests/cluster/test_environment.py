"""Executors with a different Python environment get sparkdl sent, or the fit ends with a clear error.

An environment here is a folder of links to the packages of this one, some of them missing or replaced, and a
`python` that sees nothing but this folder.
"""

import site
import socket
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkdl import Network, SparkModel
from sparkdl.errors import PreflightError
from sparkdl.spark import application

MASTERS = ("standalone",)


class Environment:
    """A Python with the packages of this one, except some.

    Args:
        folder: the folder to make it in.
        without: the prefixes of the names of the omitted packages.
    """

    def __init__(self, folder, *without):
        self.packages, self.python = folder / "packages", folder / "python"
        self.packages.mkdir(parents=True)
        for name in [*site.getsitepackages(), site.getusersitepackages()]:
            for path in Path(name).glob("*"):
                link = self.packages / path.name
                if not path.name.startswith((*without, "__pycache__")) and not link.exists():
                    link.symlink_to(path)
        # -S: ignore this Python's own site-packages; -P: ignore the folder that it is started in.
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH={self.packages} exec {sys.executable} -S -P "$@"\n')
        self.python.chmod(0o755)

    def add(self, path, text=""):
        """Write a file into the packages folder."""
        (self.packages / path).parent.mkdir(exist_ok=True)
        (self.packages / path).write_text(text)


@pytest.fixture
def environment(spark, tmp_path, monkeypatch):
    """A function that makes an environment without some packages and lets executors use it."""

    def use(*without):
        made = Environment(tmp_path / "environment", *without)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(made.python))
        return made

    # Files that a fit sends to executors go to every later Python worker of the application.
    monkeypatch.setattr(spark.sparkContext, "_python_includes", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return use


def fit(problem, model=None):
    return SparkModel(model or problem.model(), num_workers=2).fit(
        problem.x, problem.y, epochs=2, shuffle=False, verbose=0
    )


def refused(spark, problem):
    """Return the error of a fit, after checking that no job is left running."""
    with pytest.raises(PreflightError) as caught:
        fit(problem)
    assert spark.sparkContext.statusTracker().getActiveJobsIds() == []
    return str(caught.value)


@pytest.mark.one_case
def test_executors_without_sparkdl_are_sent_it(problem, environment):
    """Executors without sparkdl get it with the job, and the result is that of plain Keras."""
    environment("sparkdl", "__editable__", "cloudpickle", "flask", "cheroot", "rich-")
    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    history = fit(problem, model)

    reference.fit(problem.x, problem.y, epochs=2, shuffle=False, verbose=0)
    assert problem.distance(model, reference, start) <= 1
    assert history.training["restarts"] == 0


@pytest.mark.whole
def test_executors_without_keras_are_refused(spark, problem, environment):
    """The error for executors without Keras names host, package, the driver's version and the remedy."""
    environment("keras")

    message = refused(spark, problem)

    assert f" has no keras; the driver has keras {keras.__version__}. " in message
    assert "spark.pyspark.python, or --archives with a packed venv" in message


@pytest.mark.one_case
def test_executors_with_another_keras_are_refused(spark, problem, environment):
    """The error for executors with another Keras names both versions."""
    environment("keras-").add("keras-9.9.0.dist-info/METADATA", "Name: keras\nVersion: 9.9.0\n")

    assert f" has keras 9.9.0; the driver has keras {keras.__version__}. " in refused(spark, problem)


@pytest.mark.whole
def test_executors_without_the_backend_are_refused(spark, problem, environment):
    """Executors with Keras but without its backend are refused."""
    environment("tensorflow")

    assert " has no tensorflow, the Keras backend of the driver. " in refused(spark, problem)


@pytest.mark.whole
def test_executors_with_another_numpy_are_refused(spark, problem, environment):
    """Executors with another major version of NumPy are refused: it may not read the driver's arrays."""
    environment("numpy-").add("numpy-1.0.dist-info/METADATA", "Name: numpy\nVersion: 1.0\n")

    assert f" has numpy 1.0; the driver has numpy {np.__version__}. " in refused(spark, problem)


def test_executors_with_another_python_are_refused(spark, problem, monkeypatch):
    """Another Python version, which Spark itself detects, raises the same kind of error."""
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.8")

    message = refused(spark, problem)

    assert f" runs Python {sys.version_info[0]}.{sys.version_info[1]}; the driver runs 3.8. " in message
    assert "127.0.0.11, 127.0.0.12" in message  # Spark does not say which of them
    assert "spark.pyspark.python, or --archives with a packed venv" in message


def test_executors_with_a_foreign_sparkdl_are_refused(spark, problem, environment):
    """A foreign package named sparkdl, as Databricks had one, is named with its file and the remedy."""
    made = environment("sparkdl", "__editable__")
    made.add("sparkdl/__init__.py", '__version__ = "2.0.0-db1"\n')

    message = refused(spark, problem)

    assert f" has a different sparkdl, 2.0.0-db1 from {made.packages}/sparkdl/__init__.py; " in message
    assert "--py-files" in message


def test_executors_that_do_not_reach_the_driver_say_so(spark, problem):
    """The error for an unreachable driver names the address tried and the settings for it."""
    spark_model = SparkModel(problem.model(), num_workers=2, network=Network(advertised_host="127.0.0.99"))

    with pytest.raises(PreflightError, match=r"cannot reach .* at 127\.0\.0\.99:\d+ ") as caught:
        spark_model.fit(problem.x, problem.y, verbose=0)

    assert "spark.driver.host or advertised_host=" in str(caught.value)


@pytest.mark.whole
def test_an_address_of_ipv6_may_have_brackets(spark, problem):
    """An IPv6 address may have brackets, as Spark writes it (spark.driver.host)."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    ours = SparkModel(
        problem.model(), num_workers=2, network=Network(bind_address="[::1]", advertised_host="[::1]")
    )

    assert 1 == len(ours.fit(problem.x, problem.y, verbose=0).history["loss"])


def test_spark_settings_say_where_the_endpoint_is(spark, problem, monkeypatch):
    """Spark settings (bindAddress, advertisedHost, port) place the endpoint unless arguments do.

    A request without the token is refused and counted.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ours = {"bindAddress": "127.0.0.3", "advertisedHost": "127.0.0.3", "port": str(port)}
    settings = dict(spark.sparkContext.getConf().getAll())
    settings |= {f"spark.sparkdl.{name}": value for name, value in ours.items()}
    monkeypatch.setitem(application._settings, spark.sparkContext, settings)
    seen = []

    def ask(epoch, logs):
        with socket.create_connection(("127.0.0.3", port)) as connection:
            connection.sendall(b"GET /v1/status HTTP/1.1\r\nHost: h\r\n\r\n")
            seen.append((connection.getpeername(), connection.recv(12)))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=ask)
    model = SparkModel(problem.model(), num_workers=2)
    history = model.fit(problem.x, problem.y, verbose=0, callbacks=[callback])

    assert seen == [(("127.0.0.3", port), b"HTTP/1.1 401")]
    assert 1 == history.training["refused_requests"]


@pytest.mark.whole
def test_proxies_of_the_executors_are_not_used(spark, problem, monkeypatch):
    """Workers connect to the driver directly, whatever proxy their environment names."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setitem(spark.sparkContext.environment, name, "http://127.0.0.1:9")
    monkeypatch.setitem(spark.sparkContext.environment, "NO_PROXY", "")

    assert len(fit(problem).history["loss"]) == 2
