"""The preflight of a task: check, before anything else, that its machine can take part.

``check`` and ``task_main`` are pickled *by value* (see ``by_value``), because an executor may have no
sparkdl, or a different version. So they are self-contained and import modules in their bodies. ``reach`` runs
after ``check``, when sparkdl is known to match the driver's.
"""

from __future__ import annotations

import builtins
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

from sparkdl import _version
from sparkdl.errors import PreflightError, SparkDLError, WorkerError
from sparkdl.process import memory
from sparkdl.process.reasons import reason_of

MARK = "sparkdl-preflight:"
MISSING = "sparkdl is not installed on the executors"
REMEDY = (
    "Give executors the environment of the driver (spark.pyspark.python, or --archives with a packed venv)."
)
HERE = "Activate this program's environment, or set PYSPARK_PYTHON={python} before Spark starts."
OTHER_PYTHON = "Executor {host} runs Python {found} ({path}); the driver runs {wanted}. {remedy}"
STALE = "This Python process has already imported Keras with another backend"
EndpointFields = tuple[str, int, str, bytes, bytes]  # the fields of an Endpoint


class Expected(TypedDict):
    """The properties that an executor must have in common with the driver, and texts for error messages.

    An executor without sparkdl can unpickle them.
    """

    python: str
    packages: dict[str, str]
    backend: str | None
    local: bool
    sparkdl: str
    sparkdl_file: str
    mark: str
    missing: str
    remedy: str
    stale: str
    other_python: str


class Call(TypedDict):
    """A task and its context, as values that an executor without sparkdl can unpickle.

    Attributes:
        task: the pickled Task.
        uses_keras: whether it needs Keras.
        spread: if Spark gives the tasks no GPUs, whether each task has to use the GPU chosen for it, so that
            tasks are spread over the machine's GPUs; else a reused Python process keeps the GPU that it is
            bound to.
        endpoint: the fields of the run's endpoint, if there is one.
        generation: the generation of the worker group.
        shared: the handle that ``SparkApplication.share`` returned.
    """

    task: bytes
    uses_keras: bool
    spread: bool
    endpoint: EndpointFields | None
    generation: int
    shared: object


def expectations(backend: str | None, *, local: bool) -> Expected:
    """Return the properties that an executor must have in common with this driver.

    Args:
        backend: the Keras backend; None where Keras is not used.
        local: whether executors are in the driver's JVM.
    """
    packages = {name: version(name) for name in (("keras", "numpy") if backend else ("numpy", "optree"))}
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "packages": packages,
        "backend": backend,
        "local": local,
        "sparkdl": _version.__version__,
        "sparkdl_file": str(Path(_version.__file__).with_name("__init__.py")),
        "mark": MARK,
        "missing": MISSING,
        "remedy": remedy(local=local),
        "stale": STALE,
        "other_python": OTHER_PYTHON,
    }


def remedy(*, local: bool) -> str:
    """Return the advice for executors whose environment differs from the driver's.

    Args:
        local: whether the executors are in the driver's JVM.
    """
    return HERE.format(python=sys.executable) if local else REMEDY


def check(expected: Expected) -> None:
    """Compare this process with the driver's.

    Args:
        expected: the result of ``expectations``.

    Raises:
        RuntimeError: a property differs; the message begins with the mark of ``expectations``.
    """
    import importlib.metadata
    import importlib.util
    import platform
    import socket
    import sys

    host = socket.gethostname()

    def fail(what: str) -> None:
        raise RuntimeError(f"{expected['mark']} {what}")

    remedy = expected["remedy"]
    python = ".".join(platform.python_version_tuple()[:2])
    if python != expected["python"]:
        parts = {"host": host, "found": python, "path": sys.executable, "wanted": expected["python"]}
        fail(expected["other_python"].format(remedy=remedy, **parts))
    for name, wanted in expected["packages"].items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fail(f"Executor {host} has no {name}; the driver has {name} {wanted}. {remedy}")
        same = found == wanted if name == "keras" else found.split(".")[0] == wanted.split(".")[0]
        if not same:
            fail(f"Executor {host} has {name} {found}; the driver has {name} {wanted}. {remedy}")
    if expected["backend"] and importlib.util.find_spec(expected["backend"]) is None:
        fail(f"Executor {host} has no {expected['backend']}, the Keras backend of the driver. {remedy}")
    loaded = sys.modules.get("keras")
    if loaded is not None and expected["backend"] not in (None, loaded.backend.backend()):
        fail(f"{expected['stale']}: {loaded.backend.backend()} instead of {expected['backend']} ({host}).")
    if importlib.util.find_spec("sparkdl") is None:
        fail(f"{expected['missing']} ({host}).")
    sparkdl = importlib.import_module("sparkdl")  # perhaps a different project of that name
    found = getattr(sparkdl, "__version__", "an unknown version")
    if found != expected["sparkdl"]:
        fail(
            f"Executor {host} has a different sparkdl, {found} from {sparkdl.__file__}; the driver has "
            f"{expected['sparkdl']} from {expected['sparkdl_file']}. Remove the executor's sparkdl, or put "
            "sparkdl-keras first on the executors' path with --py-files."
        )


def reach(
    expected: Expected, endpoint: EndpointFields, *, timeouts: tuple[float, ...] = (10, 60, 60)
) -> None:
    """Connect to the driver's endpoint from a task whose sparkdl matches the driver's.

    Args:
        expected: the result of ``expectations``.
        endpoint: the fields of the endpoint.
        timeouts: seconds to wait for an answer, one number per attempt. Later attempts wait longer, in
            case the driver is paused: its machine then still accepts connections, but nothing answers.

    Raises:
        RuntimeError: the endpoint does not answer, or another program answers; the message begins with the
            mark of ``expectations``.
    """
    from sparkdl.transport.tls import TlsError, connection_to

    host = socket.gethostname()
    address, port, token, _, certificate = endpoint

    def fail(what: str) -> None:
        raise RuntimeError(f"{expected['mark']} {what}")

    for tries_left, timeout in zip(range(len(timeouts) - 1, -1, -1), timeouts, strict=True):
        connection = connection_to(address, port, certificate, timeout, token)
        try:
            connection.request("GET", "/v1/ping", headers={"Authorization": f"Bearer {token}"})
            status = connection.getresponse().status
        except (HTTPException, TlsError, OSError) as error:
            if tries_left and isinstance(error, (HTTPException, ConnectionError)):
                time.sleep(0.5)
                continue
            if tries_left and isinstance(error, TimeoutError) and _accepts(address, port, timeouts[0]):
                continue
            if isinstance(error, (HTTPException, TlsError)):
                fail(
                    f"Executor {host} got an invalid response from {address}:{port} ({error}); another "
                    "program uses that port."
                )
            fail(
                f"Executor {host} cannot reach the driver's endpoint at {address}:{port} ({error}). Set "
                "spark.driver.host or advertised_host= to an address of the driver that executors can "
                "reach, and port= to a port or range that is open to them. Over Spark Connect, set "
                'placement="worker" instead.'
            )
        finally:
            connection.close()
        if status < 500 or status == 503:
            break
        time.sleep(0.5)
    if status not in (204, 503):
        cause = "another program uses that port"
        if status == 401:
            cause = "another run uses that port, or a proxy removes the Authorization header"
        fail(f"Executor {host} got status {status} from {address}:{port}; {cause}.")


def _accepts(address: str, port: int, timeout: float) -> bool:
    """Return True if a machine accepts connections at a port."""
    try:
        socket.create_connection((address, port), timeout).close()
    except OSError:
        return False
    return True


ASK = """
import json, sys
print(json.dumps(["%d.%d" % sys.version_info[:2], sys.executable]))
if sys.argv[1]:
    exec(sys.argv[2])
    check(json.loads(sys.argv[1]))
"""  # any Python version can run this; argv[2] is passed only to a Python of the driver's version
_passed: set[tuple[str | None, str | None]] = set()


def require_python(python: str, environment: dict[str, str], expected: Expected) -> None:
    """Run the preflight in the Python that Spark would start on this machine.

    Args:
        python: the command.
        environment: the environment variables that Spark sets for it.
        expected: the result of ``expectations``.

    Raises:
        PreflightError: this Python does not start, or differs from the driver's.
    """
    path = shutil.which(python)
    key = path, expected["backend"]
    relative = os.sep in python and not os.path.isabs(python)  # relative to a folder that only Spark knows
    if relative or key in _passed or path and os.path.abspath(path) == os.path.abspath(sys.executable):
        return
    host = socket.gethostname()
    found, path, _ = _ask(python, environment)
    if found is None:
        raise PreflightError(
            f"Executor {host} cannot run {python!r} as its Python: {path}. {expected['remedy']}"
        )
    if found != expected["python"]:
        parts = {"host": host, "found": found, "path": path, "wanted": expected["python"]}
        raise PreflightError(OTHER_PYTHON.format(remedy=expected["remedy"], **parts))
    with suppress(OSError):  # raised where the source of ``check`` is not available
        source = f"from __future__ import annotations\n{inspect.getsource(check)}"
        *_, line = _ask(python, environment, json.dumps(expected), source)
        marked = re.search(rf"{re.escape(MARK)} (.+)", line)
        if marked and MISSING not in marked[1]:  # if sparkdl is missing, the driver sends it later
            raise PreflightError(marked[1])
    _passed.add(key)


def _ask(python: str, environment: dict[str, str], *arguments: str) -> tuple[str | None, str, str]:
    """Return the version, the path and the stderr of a Python; None and the reason if it does not run."""
    command = [python, "-c", ASK, *(arguments or ("", ""))]
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
        )
        version, path = json.loads(done.stdout.splitlines()[0])
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error), ""
    except (ValueError, IndexError):
        return None, (done.stderr.strip() or f"it exits with status {done.returncode}").splitlines()[-1], ""
    return version, path, done.stderr


class Shared:
    """A value that tasks share over Spark Connect, which has no broadcast variables.

    Args:
        place: the name of a file of the session, or the content of such a file.
    """

    def __init__(self, place: str | bytes) -> None:
        self.place = place

    @property
    def value(self) -> Any:
        """The value.

        Raises:
            ClusterError: this task cannot read the session's files.
        """
        from pyspark import SparkFiles
        from pyspark.serializers import CloudPickleSerializer

        from sparkdl.errors import ClusterError

        serializer: Any = CloudPickleSerializer
        if isinstance(self.place, bytes):
            return serializer().loads(self.place)
        path = Path(SparkFiles.get(self.place))
        if not path.exists():
            raise ClusterError(
                "The model was sent as a file of the Spark Connect session, and tasks of a streaming query "
                "cannot read such files. Use SparkModel.predict or KerasTransformer instead of predict_udf "
                "for a stream; they send the model with each task."
            )
        return serializer().loads(path.read_bytes())


def task_main(
    given: Iterator[object], *, check: Callable[[Expected], None], expected: Expected, call: Call
) -> Iterator[object]:
    """Run a task of a job: the preflight, then the task's ``run`` (see ``sparkdl.worker.tasks``).

    If it raises, Spark ends the Python process, and the next task gets a new one.
    """
    from pyspark import TaskContext
    from pyspark.serializers import CloudPickleSerializer

    context: Any = TaskContext.get()
    serializer: Any = CloudPickleSerializer
    check(expected)
    from sparkdl.spark import preflight

    with preflight.shortages_named(context.partitionId()):
        from sparkdl.transport.exchange import Endpoint
        from sparkdl.worker import devices

        endpoint, shared = call["endpoint"], call["shared"]
        if endpoint is not None:
            preflight.reach(expected, endpoint)
        gpu = context.resources().get("gpu")
        addresses = gpu.addresses if gpu else ()
        place = context.partitionId() if expected["local"] else None
        quietly = expected["local"] and devices.is_quiet()
        with devices.hold(expected["backend"], context.cpus(), addresses, place, apart=call["spread"]):
            from sparkdl.worker import tasks

            if call["uses_keras"]:
                tasks.import_keras(quietly=quietly)
            task = serializer().loads(call["task"])
            if isinstance(shared, str | bytes):
                shared = preflight.Shared(shared)
            known = Endpoint(*endpoint) if endpoint else None
            yield from tasks.run(task, given, tasks.TaskCall(context, known, call["generation"], shared))


@contextmanager
def shortages_named(worker: int) -> Iterator[None]:
    """Raise a failed allocation in a ``with`` block as a WorkerError with the limit and the usage of memory.

    Other exceptions are left alone. Only this process knows its limits, and libraries that are imported here
    do not name them.

    Args:
        worker: the worker's index.
    """
    try:
        yield
    except SparkDLError:
        raise
    except Exception as error:
        reason = reason_of(error)
        if not reason.startswith(memory.SHORT):
            raise
        raise WorkerError.of(reason, host=socket.gethostname(), worker=worker) from error


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function that is pickled by value, not by the name of its module."""
    copy = types.FunctionType(
        function.__code__, {"__builtins__": builtins, "__name__": "__main__"}, function.__name__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = "__main__"
    return copy
