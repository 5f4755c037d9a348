"""Checks of a Spark application: its start, slots, executors and GPUs, the endpoint, and a small fit."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl.api.spark_model import SparkModel
from sparkdl.doctor.installation import LEAST_SPACE
from sparkdl.doctor.options import Options
from sparkdl.doctor.probe import ProbeTask
from sparkdl.doctor.report import Finding
from sparkdl.driver.serving import serving
from sparkdl.driver.training_record import counted
from sparkdl.errors import ClusterError
from sparkdl.modeling import keras_settings
from sparkdl.process.reasons import reason_of
from sparkdl.server.allreduce import AllReduceCoordinator
from sparkdl.server.http_app import Traffic
from sparkdl.settings import FaultTolerance, Network
from sparkdl.spark import jobs, preflight
from sparkdl.spark.application import SparkApplication, application_of
from sparkdl.spark.failures import JAVA
from sparkdl.transport.exchange import Endpoint

QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
CONNECT_SECONDS = 5.0
PORTS = {"spark": 7077, "sc": 15002, "https": 443, "http": 80}  # the default for a URL without a port
ROWS, EPOCHS = 64, 3
LARGEST = 1e-3  # the largest relative difference from Keras's weights; a lost row causes more than 1e-2
ADDRESS = "Correct --master, start the master, or open its port to this machine."


class ClusterChecks:
    """A Spark application under examination. The checks are called in the order below.

    Args:
        options: the application to check.
        log: the file with the output of Spark.
    """

    application: SparkApplication

    def __init__(self, options: Options, log: Path) -> None:
        self.options, self.num_workers, self._log = options, options.num_workers, log
        self._found: list[dict[str, Any]] = []  # the descriptions of the tasks
        self._shared = False  # whether workers share a GPU
        self._started: SparkApplication | Exception | None = None

    def start(self) -> Finding:
        """Start the application."""
        if (unreachable := _unreachable(self.options.master or "")) is not None:
            return Finding("failed", unreachable)
        begun = time.monotonic()
        thread = threading.Thread(target=self._start, name="sparkdl-doctor", daemon=True)
        thread.start()
        thread.join(self.options.timeout)
        if self._started is None:
            return Finding(
                "failed",
                f"Spark did not start in {self.options.timeout:g} s. Free resources of the cluster, or raise "
                "--timeout.",
            )
        if isinstance(self._started, Exception):
            reason = _why(self._started, self._log).rstrip(".")
            text = f"Spark did not start: {reason}. Correct --master or the setting that caused this."
            return Finding("failed", text)
        self.application = self._started
        master = self.options.master if self.application.remote else self.application.setting("spark.master")
        version = self.application.session.version
        return Finding("ok", f"{version} at {master}, started in {time.monotonic() - begun:.0f} s")

    def _start(self) -> None:
        try:
            self._started = _application(self.options)
        except Exception as error:  # noqa: BLE001 - reported by ``start``
            self._started = error

    def slots(self) -> Finding:
        """Check that there are slots for all workers; if the check fails, later checks use fewer workers."""
        wanted = self.num_workers
        try:
            self.application.num_workers(wanted, None, self.options.timeout)
        except ClusterError:
            self.num_workers = min(wanted, self.application.slots())
            raise
        found = self.application.slots()
        if self.application.dynamic:
            return Finding("ok", f"{found}, and more by dynamic allocation; workers: {wanted}")
        return Finding("ok", f"{found}; workers: {wanted}")

    def executors(self) -> Finding:
        """Compare the Python and packages of executors with those of this process; import Keras there."""
        self.application.require_python(keras_settings.backend())
        with self._time_limit():
            self._found = self._probe(None)
        hosts = Counter(each["host"] for each in self._found)
        pythons = ", ".join(sorted({each["python"] for each in self._found}))
        tasks = ", ".join(f"{host}: {count}" for host, count in sorted(hosts.items()))
        least = min(self._found, key=lambda each: float(each["free"]))
        if least["free"] < LEAST_SPACE:
            return Finding(
                "warning",
                f"{least['free'] / (1 << 30):.1f} GiB free in {least['folder']} on {least['host']}. Free "
                "some space, or set spark.local.dir to another folder.",
            )
        text = f"Python {pythons} with packages that match the driver's; tasks by host: {tasks}"
        return Finding("ok", text)

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Cancel the jobs of a ``with`` block after the timeout; tasks may wait for executors forever.

        Raises:
            ClusterError: the time is up.
        """
        session, late = self.application.session, threading.Event()

        def cancel() -> None:
            late.set()
            if self.application.remote:
                session.interruptAll()
            else:
                session.sparkContext.cancelAllJobs()

        timer = threading.Timer(self.options.timeout, cancel)
        timer.start()
        try:
            yield
        except ClusterError:
            if not late.is_set():
                raise
            raise ClusterError(
                f"Tasks did not end in {self.options.timeout:g} s; executors may be missing, or busy. Free "
                "resources of the cluster, or raise --timeout."
            ) from None
        finally:
            timer.cancel()

    @property
    def has_gpus(self) -> bool:
        """True if a task of the check ``executors`` found a GPU."""
        return any(each["gpus"] for each in self._found)

    def gpus(self) -> Finding:
        """Check that each worker has a GPU of its own."""
        held = Counter((each["host"], gpu) for each in self._found for gpu in each["gpus"])
        text = ", ".join(f"GPU {gpu} on {host}" for host, gpu in sorted(held))
        if without := sum(not each["gpus"] for each in self._found):
            return Finding(
                "warning", f"{text}; {without} of the workers have no GPU. Use executors that all have GPUs."
            )
        self._shared = max(held.values()) > 1
        if self._shared:
            return Finding(
                "warning",
                f"{text}, for {self.num_workers} workers. Use fewer workers, or SparkModel(share_gpus=True).",
            )
        return Finding("ok", text)

    def endpoint(self) -> Finding:
        """Open an endpoint as a fit does, and connect to it from executors."""
        coordinator = AllReduceCoordinator(secrets.token_bytes(16), self.num_workers)
        with serving(coordinator, self.application, Network(), Traffic()) as endpoint:
            self._probe(endpoint)
        secured = " with TLS" if endpoint.certificate else ""
        return Finding("ok", f"executors reach {endpoint.host}:{endpoint.port}{secured}")

    def _probe(self, endpoint: Endpoint | None) -> list[dict[str, Any]]:
        """Return the description of each task of a worker group."""
        cluster, count = self.application, self.num_workers
        expected = preflight.expectations(keras_settings.backend(), local=cluster.local)
        stages = jobs.StageFactory(expected=expected, endpoint=endpoint, profile=cluster.profile)
        stage = stages.make(ProbeTask(arrow=cluster.remote))
        barrier = not cluster.dynamic  # so that each task is in a different slot
        if cluster.remote:
            frame = cluster.session.range(0, count, 1, count)
            rows = jobs.run(
                jobs.run_frame(frame, stage, "data binary", barrier=barrier),
                cluster,
                of_rows=False,
                description="sparkdl: doctor",
            )
            return [json.loads(bytes(row.data)) for row in rows]
        rdd = cluster.context.parallelize(range(count), count)
        found: list[Any] = jobs.run(
            jobs.run_rdd(rdd, stage, barrier=barrier), cluster, of_rows=False, description="sparkdl: doctor"
        )
        return [json.loads(each) for each in found]

    def fit(self) -> Finding:
        """Train a small model, and compare its weights with those of ``keras.Model.fit``."""
        begun = time.monotonic()
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
        y = x.sum(axis=1, keepdims=True)
        plain, trained = _model(), _model()
        start = trained.get_weights()
        # Each batch has all rows, so their order does not matter.
        options: dict[str, Any] = {"batch_size": ROWS, "epochs": EPOCHS, "verbose": 0}
        plain.fit(x, y, **options)
        patience = FaultTolerance(start_timeout=self.options.timeout)
        model = SparkModel(
            trained, num_workers=self.num_workers, share_gpus=self._shared, fault_tolerance=patience
        )
        if self.application.remote:
            rows = [(one.tolist(), float(label[0])) for one, label in zip(x, y, strict=True)]
            schema = "features array<float>, label float"
            model.fit(self.application.session.createDataFrame(rows, schema), **options)
        else:
            model.fit(x, y, **options)
        distance = _distance(trained.get_weights(), plain.get_weights(), start)
        text = (
            f"{counted(self.num_workers, 'worker')} in {time.monotonic() - begun:.0f} s; relative difference "
            f"from the weights of keras.Model.fit: {distance:.0e}"
        )
        if not distance <= LARGEST:
            return Finding("failed", f"{text}, expected at most {LARGEST:.0e}. Report this as a bug.")
        return Finding("ok", text)

    def stop(self) -> None:
        """Stop the application, if it was started."""
        if isinstance(self._started, SparkApplication):
            self._started.session.stop()


def _application(options: Options) -> SparkApplication:
    """Start the application as a fit without a session does; over Spark Connect, open a session."""
    if options.remote:
        builder = SparkSession.builder.remote(str(options.master))
        for setting in options.settings:
            builder = builder.config(*setting.split("=", 1))
        return application_of(builder.getOrCreate())
    os.environ.pop("SPARK_REMOTE", None)  # --master takes precedence
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        settings = [*(f"{name}={value}" for name, value in QUIET.items()), *options.settings]
        more = [part for setting in settings for part in ("--conf", setting)]
        more += ["--master", options.master] if options.master else []
        given = os.environ.get("PYSPARK_SUBMIT_ARGS", "").removesuffix("pyspark-shell")
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"{given} {shlex.join(more)} pyspark-shell"
        # spark-submit uses this only if neither its arguments nor its configuration files set a master
        os.environ.setdefault("MASTER", f"local[{options.num_workers}]")
    application = application_of(own_gpus=True)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        application.context.setLogLevel("OFF")
    return application


def _unreachable(master: str) -> str | None:
    """Return an error if no address of a master accepts connections.

    None: an address accepts connections, or the master has no address to check.

    Spark itself would try for a minute.
    """
    scheme, _, rest = master.removeprefix("k8s://").partition("://")
    errors = []
    for address in rest.split(",") if scheme in PORTS else []:
        try:
            parts = urlsplit(f"//{address}")
            place = parts.hostname or "localhost", parts.port or PORTS[scheme]
            socket.create_connection(place, CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            errors.append(f"{address} ({error})")
            continue
        return None
    return f"Nothing answers at {', '.join(errors)}. {ADDRESS}" if errors else None


def _why(error: Exception, log: Path) -> str:
    """Return the reason why Spark did not start, from its exception or, if that has none, its log."""
    text = str(error)
    if "JAVA_GATEWAY_EXITED" in text:
        text = log.read_text(errors="replace")
    if found := JAVA.findall(text):
        return f"{found[-1][0].rpartition('.')[2]}: {found[-1][1]}"
    found = re.findall(r"^(?:Error|Exception|ERROR)\b.*$", text, re.MULTILINE)
    return found[0] if found else reason_of(error)


def _model() -> keras.Model:
    """Return a compiled model whose initial weights are always the same."""
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
    ]
    layers.append(keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)))
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _distance(weights: list[Any], others: list[Any], start: list[Any]) -> float:
    """Return the distance between two lists of arrays, relative to that of ``others`` from ``start``."""
    one, other, before = (
        np.concatenate([each.ravel() for each in part]) for part in (weights, others, start)
    )
    return float(np.linalg.norm(one - other) / np.linalg.norm(other - before))
