"""Spark applications for the tests, one at a time in this process, and the small problem they train on.

A test that takes the fixture ``spark`` runs once for each kind of master that its module names in
``MASTERS``: ``local`` (threads), ``local-cluster`` (executor processes), ``standalone`` (a master and two
workers that Spark takes for two hosts) and ``connect`` (a Spark Connect server in another process, whose
application has three threads). If a module names several, each combination of the test's other parameters
runs on one of them (``selection``), unless the test is marked ``each_master``. With ``--all`` a test runs on
each of them, and on the first three if its module names none.

Of the 2 x 468 s that two cores took for the default suite in November 2026, the starts of the four
applications took 34 s, and ten tests that start a Python or a Spark of their own took 124 s. So a test runs
in the shared application if it can, and patches ``sys.modules`` rather than start a process.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import network
import pytest
from selection import is_in_sample, masters_of
from standalone import Standalone, eventually

if os.environ.get("KERAS_BACKEND") == "jax":  # several devices, on a machine without GPUs
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

KINDS = ("local", "local-cluster", "standalone")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the whole product: each test on each master")
    parser.addoption("--record", metavar="NAME", help="write the outcome into row NAME of tests/RESULTS.md")


def pytest_configure(config):
    config.addinivalue_line("markers", "whole: part of the whole product only, see --all")
    config.addinivalue_line("markers", "network: needs a user who may make network namespaces")
    config.addinivalue_line("markers", "backend(name): of what Keras does on this backend only")
    config.addinivalue_line("markers", "one_case: long; the default suite runs the first of its cases")
    config.addinivalue_line("markers", "each_master: on each kind of master that its module names")
    config.addinivalue_line("markers", "classic: needs a SparkContext, which Spark Connect does not have")
    config.addinivalue_line("markers", "apart: needs executors that are not the driver's own JVM")


def pytest_report_header(config):
    why = network.missing()
    return [f"left out: tests between hosts (-m network): {why}"] if why else []


def pytest_generate_tests(metafunc):
    if "spark" not in metafunc.fixturenames:
        return
    kinds = masters_of(metafunc.definition)
    if metafunc.config.getoption("--all") and kinds == ("local",):
        kinds = KINDS
    marks = dict.fromkeys(KINDS, pytest.mark.cluster) | dict.fromkeys(("local", "connect"), pytest.mark.spark)
    params = [pytest.param(kind, marks=marks[kind], id=kind) for kind in kinds]
    metafunc.parametrize("spark", params, indirect=True, scope="session")


def pytest_itemcollected(item):
    """Keep tests that share a Spark application, or else a file, in one process."""
    item.add_marker(pytest.mark.xdist_group(application_of(item) or str(item.path)))


def pytest_collection_modifyitems(config, items):
    values = {}
    every, left_out = config.getoption("--all") or is_named(config), []
    for item in items:
        fits = is_of_this_backend(item) and has_its_networks(item)
        if not (fits and (every or is_in_sample(item, values))):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def is_of_this_backend(item):
    """Return True if the test is for the backend that Keras runs on."""
    mark = item.get_closest_marker("backend")
    return mark is None or mark.args == (os.environ.get("KERAS_BACKEND", "tensorflow"),)


def has_its_networks(item):
    """Return True if the test needs no networks of its own, or can make them."""
    return item.get_closest_marker("network") is None or not network.missing()


def application_of(item):
    """Return the kind of master of a test's Spark application, or None."""
    return item.callspec.params["spark"] if "spark" in item.fixturenames else None


def is_named(config):
    """Return True if tests were selected by name. All of them run then, those marked ``whole`` too."""
    return bool(config.getoption("keyword")) or any("::" in argument for argument in config.args)


def pytest_terminal_summary(terminalreporter, config):
    name = config.getoption("--record")
    if not name:
        return
    counts = [f"{len(terminalreporter.getreports(kind))} {kind}" for kind in ("passed", "failed", "error")]
    counts += [f"{len(terminalreporter.getreports(kind))} {kind}" for kind in ("skipped", "deselected")]
    names = ("pyspark", "keras", "tensorflow-cpu", "jax", "torch", "numpy")
    versions = [f"{each} {version(each)}" for each in names if importlib.util.find_spec(each.split("-")[0])]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    minutes = (time.time() - terminalreporter._session_start.time) / 60
    python = ".".join(map(str, sys.version_info[:3]))
    cells = [name, ", ".join([f"Python {python}", *versions]), git.stdout.strip(), ", ".join(counts)]
    record("| " + " | ".join([*cells, f"{minutes:.0f} min on {os.cpu_count()} cores"]) + " |")


def record(row):
    """Put a row into the table of tests/RESULTS.md, replacing the row of that name."""
    path = Path(__file__).parent / "RESULTS.md"
    lines = path.read_text().splitlines()
    mine = row.split("|")[1]
    old = [index for index, line in enumerate(lines) if line.split("|")[1:2] == [mine]]
    lines[slice(old[0], old[0] + 1) if old else slice(len(lines), None)] = [row]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session", name="eventually")
def eventually_fixture():
    return eventually


# -- masters --------------------------------------------------------------------------------------


class ConnectServer:
    """A Spark Connect server in its own process.

    Args:
        settings: the settings of its application.
        folder: the folder for its log.
    """

    def __init__(self, settings, folder):
        import pyspark

        self.home, self.log = Path(pyspark.__file__).parent, folder / "server.log"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.settings = settings | {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.sql.artifact.copyFromLocalToFs.allowDestLocal": "true",
        }

    def __enter__(self):
        command = [self.home / "bin" / "spark-submit", "--master", "local[3]"]
        for name, value in self.settings.items():
            command += ["--conf", f"{name}={value}"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        if not eventually(self._answers, 180):
            self.__exit__()
            pytest.fail(f"The server of Spark Connect did not start: {self.log.read_text()}")
        return f"sc://127.0.0.1:{self.port}"

    def _answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True

    def __exit__(self, *exception):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its Python workers too
            self.process.wait()


@contextlib.contextmanager
def master_of(kind, folder):
    """Yield the URL of a running master of one kind."""
    if kind == "local":
        yield "local[2]"
    elif kind == "local-cluster":
        yield "local-cluster[2,1,1024]"
    else:
        with Standalone(folder) as cluster:
            yield cluster.url


@pytest.fixture(scope="session")
def standalone(tmp_path_factory):
    """The URL of a separate standalone master, for applications in other processes."""
    with Standalone(tmp_path_factory.mktemp("master")) as cluster:
        yield cluster.url


@pytest.fixture(scope="session", autouse=True)
def spark_environment(tmp_path_factory):
    """Set the environment of all Spark processes: loopback address, this Python, a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        patch.delenv("SPARK_LOCAL_DIRS", raising=False)
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            if name not in os.environ:
                patch.setenv(name, sys.executable)
        yield


@pytest.fixture(scope="session")
def spark(request, tmp_path_factory):
    """A Spark session on the kind of master that the test runs for."""
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp(request.param)
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.rpc.message.maxSize": "1",  # MiB; a task's message includes the data it carries
        # RDD and DataFrame tasks then share their Python workers, and keras is imported half as often.
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    }
    if request.param == "connect":
        with ConnectServer(settings, folder) as url:
            session = SparkSession.builder.remote(url).getOrCreate()
            yield session
            session.stop()
        del os.environ["SPARK_CONNECT_MODE_ENABLED"]  # pyspark leaves it set; the next session is classic
        return
    with master_of(request.param, folder) as url:
        builder = SparkSession.builder.master(url).appName("sparkdl tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        application = session.sparkContext.applicationId
        yield session
        session.stop()
    if request.param == "local-cluster":  # it writes below its Spark home, regardless of settings
        home = Path(os.environ.get("SPARK_HOME", sys.modules["pyspark"].__path__[0]))
        shutil.rmtree(home / "work" / application, ignore_errors=True)
        with contextlib.suppress(OSError):
            (home / "work").rmdir()


@pytest.fixture(autouse=True)
def classic_elsewhere(request, monkeypatch):
    """Hide an open Spark Connect session from the processes that other tests start."""
    if application_of(request.node) != "connect":
        monkeypatch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)


@pytest.fixture
def jobs(spark):
    """A function that returns the ids of all jobs that the application has run, if they are known."""
    if not hasattr(spark, "sparkContext"):
        return list
    return lambda: sorted(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


# -- the problem ----------------------------------------------------------------------------------


class Problem:
    """Three classes of points, and a network of one hidden layer with smooth activations.

    Its layers are named, so that workers recognize every model here as the same and keep it compiled.
    """

    def __init__(self):
        import numpy as np

        random = np.random.default_rng(7)
        self.x = random.normal(size=(203, 6)).astype("float32")
        self._rdds = {}
        self.y = ((self.x[:, 0] > 0).astype("int64") + (self.x[:, 1] > 0)).astype("int64")

    def model(self, optimizer=None, *, loss="sparse_categorical_crossentropy", seed=1, **options):
        """Return a fresh compiled model."""
        import keras

        keras.utils.set_random_seed(seed)
        layers = [
            keras.Input((6,), name="points"),
            keras.layers.Dense(12, activation="tanh", name="hidden"),
            keras.layers.Dense(3, activation="softmax", name="class"),
        ]
        model = keras.Sequential(layers, name="network")
        optimizer = optimizer or keras.optimizers.SGD(0.3, momentum=0.9)
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
        return model

    def rdd(self, spark, *counts):
        """Return an RDD whose partitions hold these numbers of rows, in order."""
        pairs = list(zip(self.x, self.y, strict=True))
        key = spark.sparkContext.applicationId, counts
        if key not in self._rdds:  # one look at its first row is enough for all tests
            edges = [sum(counts[:k]) for k in range(len(counts) + 1)]
            parts = [pairs[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
            rdd = spark.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)
            self._rdds[key] = rdd
        return self._rdds[key]

    def interleaved(self, *counts):
        """Return x and y in the order in which partitions of these sizes take turns in a batch."""
        total = sum(counts)
        order = sorted(((j + 0.5) * total / n, k, j) for k, n in enumerate(counts) for j in range(n))
        places = [sum(counts[:k]) + j for _, k, j in order]
        return self.x[places], self.y[places]

    @staticmethod
    def distance(model, reference, start):
        """Return a model's largest distance from a reference per variable, in units of the rounding allowed.

        A unit is 1e-5 of what training moved: enough for an optimizer without second moments.
        """
        import numpy as np

        pairs = zip(model.get_weights(), reference.get_weights(), start, strict=True)
        return max(
            np.linalg.norm(w - r) / (1e-5 * np.linalg.norm(r - s) + 1e-7 * np.sqrt(r.size))
            for w, r, s in pairs
        )


@pytest.fixture(scope="session")
def problem():
    return Problem()


@pytest.fixture(scope="session")
def frames(spark, problem, tmp_path_factory):
    """DataFrames of the problem, read from files, with features as a vector, an array or scalars."""
    import pandas as pd
    from pyspark.ml.functions import array_to_vector

    folder = tmp_path_factory.mktemp("frames")
    table = pd.DataFrame({"features": problem.x.tolist(), "label": problem.y, "row": range(len(problem.y))})
    table["first"], table["sum"] = problem.x[:, 0], problem.x.sum(axis=1)
    table.to_parquet(folder / "array.parquet", row_group_size=100)
    frame = spark.read.parquet(str(folder / "array.parquet"))
    vectors = frame.withColumn("features", array_to_vector("features"))
    return {"array": frame, "vector": vectors}


@pytest.fixture
def browser():
    """Return a browser without a window and without requests of its own."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium or its driver is not installed.")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-background-networking", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()
