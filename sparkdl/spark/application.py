"""The Spark application: its slots, its addresses, and the values sent to its executors.

There are two kinds. The driver of a ``SparkApplication`` is this process, with a JVM of its own. The driver
of a ``ConnectApplication`` is a Spark Connect server, of which this process sees sessions, DataFrames and
settings, but no SparkContext.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import math
import re
import shutil
import socket
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pyspark
from pyspark import InheritableThread, SparkContext, SparkFiles, cloudpickle
from pyspark.errors import AnalysisException
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.utils import is_remote

from sparkdl.data import arrow
from sparkdl.errors import ConfigError
from sparkdl.process import interrupts
from sparkdl.spark import files, interpreter, preflight, spark_internals, startup
from sparkdl.spark.slots import LOCAL_CLUSTER, Slots, Wait, wait_of

logger = logging.getLogger(__name__)
TAG = "sparkdl-"  # the beginning of the tags of jobs
DESCRIPTION = "spark.job.description"  # Spark's local property
STOP_SECONDS = 10.0  # the time that PySpark may take to stop an application
_profiles: WeakKeyDictionary[SparkContext, Any] = WeakKeyDictionary()
_settings: WeakKeyDictionary[SparkContext, dict[str, str]] = WeakKeyDictionary()  # settings never change
# By SparkContext: the path of each broadcast's file, with a weak reference to the broadcast in the JVM.
_files_of: WeakKeyDictionary[SparkContext, dict[str, Any]] = WeakKeyDictionary()


class SparkApplication:
    """The Spark application whose driver is this process.

    Args:
        session: the session; None is the session of this process, which is created if there is none.
        own_gpus: whether each task of a worker group gets a whole GPU, even if the application's settings
            give a task a fraction of a GPU, or none. Has no effect if executors have no GPUs, on a local
            master, under dynamic allocation, or before Spark 4.0.
    """

    remote = False  # whether the driver is another process
    places_rows = hasattr(DataFrame, "repartitionById")  # whether rows can be sent to a partition by number
    _has_package: WeakSet[Any] = WeakSet()  # the applications and sessions that got sparkdl

    def __init__(self, session: Any = None, *, own_gpus: bool = False) -> None:
        made = session is None and not self.remote and spark_internals.active_context() is None
        with startup.filtered() if made else nullcontext():
            self.session: Any = session or SparkSession.builder.getOrCreate()
        interrupts.reinstall()
        self._own_gpus = own_gpus
        if not self.remote:
            interpreter.adopt(self.session, here=self._is_here(made=made))

    @property
    def context(self) -> Any:
        """The SparkContext."""
        return self.session.sparkContext

    @property
    def log_context(self) -> Any:
        """The SparkContext whose JVM logs to this process's terminal; None if there is none."""
        return self.context

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting of the application."""
        if self.context not in _settings:  # PySpark asks the JVM for each setting
            _settings[self.context] = dict(self.context.getConf().getAll())
        return _settings[self.context].get(name, default)

    @property
    def dynamic(self) -> bool:
        """True if executors are allocated dynamically."""
        return self.setting("spark.dynamicAllocation.enabled") == "true"

    @property
    def local(self) -> bool:
        """True if tasks run in the driver's own JVM."""
        return bool(re.fullmatch(r"local(\[.*\])?", self.setting("spark.master")))

    def _is_here(self, *, made: bool) -> bool:
        """Return True if executors are on this machine; ``made``: sparkdl created the session."""
        master = self.setting("spark.master")
        if self.local or re.match(LOCAL_CLUSTER, master):
            return True
        own = "|".join(map(re.escape, ("localhost", "127.0.0.1", "[::1]", socket.gethostname())))
        return made and bool(re.fullmatch(rf"spark://({own}):\d+", master))

    def rebind(self, data: Any) -> None:
        """Make the Python functions that compute an RDD or a DataFrame run with the executors' Python."""
        interpreter.rebind(data, self.context)

    def require_python(self, backend: str | None) -> None:
        """Check the Python of executors in this JVM, without a job.

        Args:
            backend: the Keras backend; None where Keras is not used.

        Raises:
            PreflightError: it does not start, or its version or its packages differ from the driver's.
        """
        if self.local:
            expected = preflight.expectations(backend, local=True)
            preflight.require_python(self.context.pythonExec, self.context.environment, expected)

    @property
    def task_bytes(self) -> int:
        """The bytes of data to put into the message that starts a task: a quarter of Spark's limit."""
        return int(self.setting("spark.rpc.message.maxSize", "128")) << 18

    @property
    def separate_gpus(self) -> int:
        """The number of GPUs per executor if each task gets its own; 0: the application's settings apply."""
        if not self._own_gpus or self.local or self.dynamic or int(pyspark.__version__.split(".")[0]) < 4:
            return 0
        has, part = (self.setting(f"spark.{of}.resource.gpu.amount", "0") for of in ("executor", "task"))
        return int(has) if float(part) < 1 else 0

    @property
    def profile(self) -> Any:
        """The ResourceProfile of a task with one GPU and its share of the cores; None: the default one."""
        if not self.separate_gpus:
            return None
        if self.context not in _profiles:
            cores = Slots(self).executor_cores()
            cpus = max(cores // self.separate_gpus, int(self.setting("spark.task.cpus", "1")))
            requests = TaskResourceRequests().cpus(cpus).resource("gpu", 1.0)
            _profiles[self.context] = ResourceProfileBuilder().require(requests).build
        return _profiles[self.context]

    def slots(self) -> int:
        """Return the number of tasks that can run at the same time on the present executors."""
        try:
            return spark_internals.concurrent_tasks(self.context, self.profile)
        except Exception as error:  # noqa: BLE001 - a private call; if it is refused, use the public estimate
            logger.debug("maxNumConcurrentTasks failed: %s", error)
            return int(self.context.defaultParallelism)

    def hosts(self) -> list[str]:
        """Return the hosts of the executors and of the driver."""
        return sorted({str(executor.host()) for executor in spark_internals.executors(self.context)})

    def age(self) -> float:
        """Return the seconds since the application started, at most the JVM's uptime.

        The limit corrects for a clock that was set forward.
        """
        java = spark_internals.jvm(self.context).java
        machine = java.lang.management.ManagementFactory.getRuntimeMXBean()
        now = time.time()  # noqa: TID251 - the JVM is on this machine
        return float(max(0.0, min(now - self.context.startTime / 1000, machine.getUptime() / 1000)))

    def num_workers(self, wanted: int | None, most: int | None, timeout: float) -> tuple[int, str]:
        """Return the number of workers to use, and the reason; see ``Slots.num_workers``."""
        return Slots(self).num_workers(wanted, most, timeout)

    def most_slots(self) -> int:
        """Return the number of slots at the limit of dynamic allocation; 0 without a known limit."""
        return Slots(self).most()

    def addresses(self, bind: str | None, advertised: str | None) -> tuple[str, str]:
        """Return the address that the endpoint listens on, and the host that executors connect to."""
        listen, host = self._own_addresses()
        found = (
            bind or self.setting("spark.sparkdl.bindAddress") or listen,
            advertised or self.setting("spark.sparkdl.advertisedHost") or host,
        )
        listen, host = (address.removeprefix("[").removesuffix("]") for address in found)  # IPv6 brackets
        return listen, host

    def _own_addresses(self) -> tuple[str, str]:
        host = self.setting("spark.driver.host", "127.0.0.1")
        return self.setting("spark.driver.bindAddress", host), host

    def share(self, value: Any, *, streams: bool = False) -> Any:
        """Return a handle to a value for the closures of jobs, so that the value is sent only once.

        Args:
            value: a value that can be pickled.
            streams: whether the jobs belong to a streaming query.
        """
        self._remove_files()
        shared = self.context.broadcast(value)
        reference = spark_internals.weak_reference(self.context, shared)
        _files_of.setdefault(self.context, {})[spark_internals.broadcast_file(shared)] = reference
        return shared

    def forget(self, shared: Any) -> None:
        """Free a value that ``share`` sent, even if plans in the JVM still refer to it."""
        with self._unless_stopped():
            shared.destroy()
            _files_of.get(self.context, {}).pop(spark_internals.broadcast_file(shared), None)

    def _remove_files(self) -> None:
        """Remove the files of freed broadcasts, which PySpark keeps until the application ends."""
        for path, reference in tuple(_files_of.get(self.context, {}).items()):
            if reference.get() is None:
                _files_of[self.context].pop(path, None)
                Path(path).unlink(missing_ok=True)

    @property
    def stopped(self) -> bool:
        """True if the Spark application has been stopped."""
        try:
            return spark_internals.is_stopped(self.context)
        except Exception:  # noqa: BLE001 - from py4j, if the JVM is gone
            return True

    def await_stop(self) -> None:
        """Wait up to STOP_SECONDS until another thread has stopped Spark, so that it can start again."""
        deadline = time.monotonic() + STOP_SECONDS
        while spark_internals.active_context() is self.context and time.monotonic() < deadline:
            time.sleep(0.05)

    @contextmanager
    def _unless_stopped(self) -> Iterator[None]:
        """Ignore errors of a ``with`` block if the application was stopped, which frees its resources too."""
        try:
            yield
        except Exception:
            if not self.stopped:
                raise

    @property
    def handle(self) -> Any:
        """The object with which Spark ML writes and reads metadata: the SparkContext."""
        return self.context

    def put(self, local: Path, target: str) -> None:
        """Copy a local file to a path, which Spark resolves; replace a file that is there."""
        files.put(local, target, overwrite=True, context=self.context, of_spark=True)

    def get(self, source: str, local: Path) -> bool:
        """Copy a file, whose path Spark resolves, to a local file; return False if it does not exist."""
        there = files.exists(source, context=self.context, of_spark=True)
        if there:
            files.get(source, local, context=self.context, of_spark=True)
        return there

    def thread(self, target: Callable[[], Any], name: str) -> threading.Thread:
        """Return a thread whose jobs inherit the properties of this thread's jobs."""
        return InheritableThread(target=target, name=name, daemon=True)

    def tag(self, tag: str) -> None:
        """Tag the jobs of this thread, and remove the sparkdl tag that the thread may have inherited."""
        for other in tuple(self.context.getJobTags()):
            if other.startswith(TAG):
                self.context.removeJobTag(other)
        self.context.addJobTag(tag)

    def describe(self, description: str) -> None:
        """Describe the jobs of this thread in Spark's UI, unless the user has described them."""
        if not self.context.getLocalProperty(DESCRIPTION):
            self.context.setLocalProperty(DESCRIPTION, description)

    def wait_of(self, tag: str) -> Wait:
        """Return the reason why tasks of the job with a tag have not begun their work."""
        with suppress(Exception):  # Spark 3.5 does not find jobs by their tags
            stages = spark_internals.stages_of(self.context, tag)
            others = spark_internals.other_jobs(self.context, tag)
            return wait_of(stages, others, spark_internals.running_tasks(self.context))
        return Wait()

    def untag(self, tag: str) -> None:
        """Remove a tag from the jobs that this thread starts from now on."""
        with self._unless_stopped():
            self.context.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with a tag."""
        with self._unless_stopped():
            self.context.cancelJobsWithTag(tag)

    def ship_package(self) -> None:
        """Send sparkdl itself to the executors once, for the Python workers that start from now on."""
        if self.context in self._has_package:
            return
        # Executors that start later fetch the archive from here, so it must last as long as the application.
        archive = Path(SparkFiles.getRootDirectory(), "sparkdl-shipped", "sparkdl-shipped.zip")
        if not archive.exists():
            archive.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
                _pack(folder).replace(archive)  # atomic, because another fit may do the same
        self.context.addPyFile(str(archive))
        self._has_package.add(self.context)


class ConnectApplication(SparkApplication):
    """The Spark application behind a Spark Connect server, of which this process is a client.

    Args:
        session: the session that jobs and artifacts belong to.

    Raises:
        ConfigError: the client is older than Spark 4.0.
    """

    remote = True

    def __init__(self, session: Any) -> None:
        if int(pyspark.__version__.split(".")[0]) < 4:
            raise ConfigError(
                f"Spark Connect needs pyspark 4.0 or newer; got pyspark {pyspark.__version__}. Install a "
                "newer version, or use a classic SparkSession, without remote()."
            )
        super().__init__(session)

    @property
    def context(self) -> Any:
        """The SparkContext, which a client of Spark Connect does not have.

        Raises:
            ConfigError: always. The message names the remedy.
        """
        raise ConfigError(
            "This call needs a SparkContext, which Spark Connect does not have. Use a classic SparkSession, "
            "without remote()."
        )

    @property
    def log_context(self) -> Any:
        """Always None: the server has its own log."""
        return None

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting of the application, or of the session."""
        return str(self.session.conf.get(name, default))

    def rebind(self, data: Any) -> None:
        """Leave the choice of a Python to the server."""

    def require_python(self, backend: str | None) -> None:
        """Leave the check to the preflight of the tasks, which run the server's Python."""

    def slots(self) -> int:
        """Run a small job, and return the number of tasks that can run at the same time.

        The server splits a range into one partition per core, or into ``spark.default.parallelism`` of them.
        So the slots that the application requested are an upper limit.
        """
        parts = self.session.range(1 << 16).select(functions.spark_partition_id().alias("part"))
        cores = int(parts.agg(functions.max("part")).first()[0]) + 1
        slots = cores // int(self.setting("spark.task.cpus", "1"))
        return min(slots, Slots(self).requested() or slots)

    def hosts(self) -> list[str]:
        """Return one string that names the server's host; the executors' own hosts are not known."""
        return [f"those of {self.session.client.host}"]

    def age(self) -> float:
        """Return infinity: the client does not know when the server started."""
        return math.inf

    def _own_addresses(self) -> tuple[str, str]:
        own = _address_towards(self.session.client.host.strip("[]"))
        return own, own

    def share(self, value: Any, *, streams: bool = False) -> Any:
        """Return the name of a session file that holds the value; the same value gives the same file.

        Streaming queries cannot read session files: for them, return the pickled value itself.
        """
        data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        if streams:
            return data
        name = f"sparkdl-{hashlib.sha256(data).hexdigest()}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_bytes(data)
            self.session.addArtifacts(str(path), file=True)
        return name

    def forget(self, shared: Any) -> None:
        """Do nothing: the file is removed with the session."""

    @property
    def stopped(self) -> bool:
        """Always False: a request to the server raises once the session is closed."""
        return False

    @property
    def handle(self) -> Any:
        """The object with which Spark ML writes and reads metadata: the session."""
        return self.session

    def put(self, local: Path, target: str) -> None:
        """Copy a local file, through the server, to an absolute path of Spark's default file system."""
        self.session.copyFromLocalToFs(str(local), target)

    def get(self, source: str, local: Path) -> bool:
        """Copy a file, whose path Spark resolves, to a local file; return False if it does not exist.

        The file is read in pieces that fit into the server's memory and messages, each by a job of its own.
        """
        file = self.session.read.format("binaryFile").load(source)
        try:
            with local.open("wb") as out:
                for start in itertools.count(1, arrow.PIECE):
                    piece = functions.substring("content", start, arrow.PIECE).alias("piece")
                    data = file.select(piece).collect()[0].piece
                    out.write(data)
                    if len(data) < arrow.PIECE:
                        break
        except AnalysisException as error:
            if "PATH_NOT_FOUND" in str(error):
                return False
            raise
        return True

    def thread(self, target: Callable[[], Any], name: str) -> threading.Thread:
        """Return a thread whose jobs inherit the tags of this thread's jobs."""
        return InheritableThread(target=target, name=name, daemon=True, session=self.session)

    def describe(self, description: str) -> None:
        """Do nothing: a Connect client has tags only."""

    def tag(self, tag: str) -> None:
        """Tag the jobs of this thread, and remove the sparkdl tag that the thread may have inherited."""
        for other in tuple(self.session.getTags()):
            if other.startswith(TAG):
                self.session.removeTag(other)
        self.session.addTag(tag)

    def untag(self, tag: str) -> None:
        """Remove a tag from the jobs that this thread starts from now on."""
        self.session.removeTag(tag)

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with a tag."""
        self.session.interruptTag(tag)

    def ship_package(self) -> None:
        """Send sparkdl itself to the executors, once per session."""
        if self.session not in self._has_package:
            with tempfile.TemporaryDirectory() as folder:
                self.session.addArtifacts(str(_pack(folder)), pyfile=True)
            self._has_package.add(self.session)


def application_of(session: Any = None, *, own_gpus: bool = False) -> SparkApplication:
    """Return the Spark application of this process.

    Args:
        session: the session that jobs belong to; None is the active one or, without Spark Connect, a new one
            if none is active.
        own_gpus: see ``SparkApplication``; ignored over Spark Connect.
    """
    if is_remote():
        return ConnectApplication(session or SparkSession.active())
    return SparkApplication(session, own_gpus=own_gpus)


def _pack(folder: str) -> Path:
    """Write sparkdl itself into an archive in a folder; return the archive's path."""
    package = Path(str(importlib.util.find_spec("sparkdl").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, Path(folder, "root", "sparkdl"), ignore=ignored)
    archive = Path(folder, "sparkdl-shipped.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as written:
        for path in sorted(Path(folder, "root").rglob("*")):
            written.write(path, path.relative_to(Path(folder, "root")))
    return archive


def _address_towards(host: str) -> str:
    """Return this machine's own address on the route to a host, to which that host can answer."""
    for family, kind, _, _, address in sorted(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def ship(cluster: SparkApplication) -> None:
    """Send sparkdl to the executors before the user starts a lazy job.

    Jobs that this package starts are run again with sparkdl if executors lack it. A job that the user starts
    cannot be run again.
    """
    if not cluster.local:
        cluster.ship_package()
