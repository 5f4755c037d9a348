"""Translation of failed Spark jobs into errors of this package.

Spark reports every failure as text. Errors that tasks raise on purpose are recognised by their names.
Phrases in the text identify the loss of a process, a wrong version of Python, a missing package, a refused or
cancelled job, and a lack of memory or disk space. Any other Python exception is reported with its own reason,
any other failure in Spark's words.
"""

from __future__ import annotations

import importlib.util
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from pyspark import errors as of_spark

from sparkdl import errors
from sparkdl.errors import (
    ClusterError,
    ConfigError,
    DataError,
    PreflightError,
    SparkDLError,
    StaleWorkerError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.process import memory
from sparkdl.process.reasons import BLOCK, FRAME, RAISED, first_reason
from sparkdl.spark import preflight, spark_internals
from sparkdl.spark.application import SparkApplication

BARRIER_REFUSED = "Barrier execution mode does not allow the following pattern of RDD chain"
NAMED = (  # errors of this package that a task raises and the driver raises again
    "StaleWorkerError",
    "TransportError",
    "DataError",
    "ModelError",
    "ConfigError",
    "DivergedError",
    "RuleError",
    "WorkerError",
)
OTHER_PYTHON = r"in worker has different version:? \(?(\d+)[., ]+(\d+)\)? than that in driver:? (\d+\.\d+)"
NOT_THERE = (  # the messages of Python and of PySpark for a missing package
    r"No module named '([\w.]+)'|\[(?:PACKAGE_NOT_INSTALLED|UNSUPPORTED_PACKAGE_VERSION)\] ([\w.-]+)"
)
NO_START = r"Cannot run program \"[^\n]*|Error from python worker:\s*\n[^\n]+(?:\n[ \t]+[^\n]+)*"
CANCELLED = (
    r"\bJob \d+ cancelled\b[^\n]*|\[?OPERATION_CANCELED\b[^\n]*|stopped SparkContext[^\n]*|"
    r"SparkContext (?:was|has been) shut ?down[^\n]*|\[INVALID_HANDLE\b[^\n]*"
)
NO_ROOM = (
    r"[^\n]*(?:spark\.driver\.maxResultSize|exceeds max allowed: spark\.rpc|No space left on device|"
    r"java\.lang\.OutOfMemoryError|StatusCode\.(?:UNAVAILABLE|RESOURCE_EXHAUSTED))[^\n]*"
)
LOST = (
    r"[^\n]*(?:exited unexpectedly|ExecutorLostFailure|FetchFailed|Lost executor|[Ww]orker lost|"
    r"org\.apache\.spark\.(?:shuffle|network|rpc|storage)\.[\w.]*Exception|Failed to get broadcast|"
    r"Python worker (?:failed to|did not)|Executor heartbeat timed out|RefusedError: )[^\n]*"
)
JAVA = re.compile(r"((?:[a-z]\w*\.)+[A-Z][\w$]*(?:Exception|Error)): ([^\n]*)")
WRAPPER = re.compile(
    r"Job aborted|Could not recover from a failed barrier|Exception thrown in awaitResult|Task failed|"
    r"An error occurred while calling|java\.util\.concurrent|(?:[\w$]+\.)+[\w$]+(?:Exception|Error)\b"
)


def explain(error: Exception, cluster: SparkApplication, *, of_rows: bool = True) -> SparkDLError:
    """Return the error of this package for a failed job's exception.

    Args:
        error: the exception that Spark raised.
        cluster: the Spark application.
        of_rows: whether the job computes the rows from the user's own RDD or DataFrame.
    """
    if cluster.stopped:
        cluster.await_stop()
        stopped = ClusterError(
            "Spark was stopped while the job was running. Start a new session and repeat the call."
        )
        stopped.cause = error
        return stopped
    text = _text(error)
    found = _of_ours(text) or _of_python(text, cluster) or _of_spark(text, cluster)
    found = found or _raised(text, cluster, of_rows=of_rows) or _lost(text, cluster)
    found = found or _of_the_plan(error, text, of_rows=of_rows)
    found.cause = error
    return found


@contextmanager
def explained_if_stopped(cluster: SparkApplication) -> Iterator[None]:
    """Explain the errors of a ``with`` block that come from the use of Spark after it was stopped.

    Errors of this package and those that the user's code raises are left alone.

    Args:
        cluster: the Spark application.

    Raises:
        ClusterError: Spark was stopped.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SparkDLError) or not _comes_from_spark(error) or not cluster.stopped:
            raise
        raise explain(error, cluster) from error


def _comes_from_spark(error: Exception) -> bool:
    """Return True if a function of PySpark, of py4j or of this package raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return module.partition(".")[0] in ("pyspark", "py4j", "sparkdl")


def _text(error: BaseException) -> str:
    """Return the whole text of an exception, with the causes that PySpark keeps separately."""
    text, cause = str(error), spark_internals.cause_of(error)
    while isinstance(cause, BaseException):
        text += f"\nCaused by: {type(cause).__name__}: {cause}"
        cause = spark_internals.cause_of(cause)
    # Spark 4.3 begins a traceback in the middle of a line.
    return re.sub(r"(?<=\S) (?=Traceback \(most recent call last\):\n)", "\n", text)


def _of_ours(text: str) -> SparkDLError | None:
    """Return the error that a task raised on purpose."""
    if marked := re.search(rf"{re.escape(preflight.MARK)} (.+)", text):
        return (StaleWorkerError if preflight.STALE in marked[1] else PreflightError)(marked[1])
    for name in NAMED:
        if found := re.search(rf"sparkdl\.errors\.{name}: (.+)", text):
            if name == "DataError":
                return DataError(found[1], traceback=_tracebacks(text))
            if name == "WorkerError":
                return WorkerError(found[1], traceback=_tracebacks(text))
            kind: type[SparkDLError] = getattr(errors, name)
            return kind(found[1])
    return None


def _of_python(text: str, cluster: SparkApplication) -> SparkDLError | None:
    """Return the error of a Python worker that failed before any code of sparkdl or of the user ran."""
    remedy, hosts = preflight.remedy(local=cluster.local), ", ".join(cluster.hosts())
    if other := re.search(OTHER_PYTHON, text):
        return PreflightError(
            f"An executor (hosts: {hosts}) runs Python {other[1]}.{other[2]}; the driver runs {other[3]}. "
            f"{remedy}"
        )
    if start := re.search(NO_START, text):
        message = start[0].splitlines()[-1].strip()
        return PreflightError(f"Executors cannot start their Python: {message}. {remedy}")
    if (missing := re.search(NOT_THERE, text)) and _is_pysparks(text):
        name = (missing[1] or missing[2]).split(".")[0].lower()
        place = re.search(r"\((\S+) executor \S+\)", text)
        host = f"Executor {place[1]}" if place else f"An executor (hosts: {hosts})"
        try:
            return PreflightError(f"{host} has no {name}; the driver has {name} {version(name)}. {remedy}")
        except PackageNotFoundError:
            spec = importlib.util.find_spec(name)
            here = f"; the driver has it from {spec.origin}" if spec else ""
            return DataError(
                f"{host} has no module {name!r}, which a function of your program needs{here}. Send it with "
                "--py-files or spark.sparkContext.addPyFile."
            )
    return None


def _is_pysparks(text: str) -> bool:
    """Return True if the last Python traceback ends in PySpark and no task of sparkdl had begun."""
    blocks = list(BLOCK.finditer(text))
    frames = list(FRAME.finditer(blocks[-1][1])) if blocks else []
    return bool(frames) and "/pyspark" in frames[-1]["path"] and "in task_main" not in text


def _of_spark(text: str, cluster: SparkApplication) -> SparkDLError | None:
    """Return the error for a job that Spark refused or ended."""
    if refused := re.search(rf"{BARRIER_REFUSED}[^\n]*", text):
        return ClusterError(refused[0])
    if cancelled := re.search(CANCELLED, text):
        return ClusterError(f"The Spark job was cancelled, or Spark was stopped: {cancelled[0]}")
    if re.search(r"exit(ed)?( with)?( code| status)?:? (137|143)\b|Container killed|OOMKilled", text):
        return WorkerLostError(
            "An executor was killed, most likely because it exceeded its memory limit (exit status 137 or "
            f"143). Python's memory is outside the heap of the JVM. {_more_overhead(cluster)}, or use fewer "
            "workers per executor."
        )
    if full := re.search(NO_ROOM, text):
        return ClusterError(f"Spark has no room for the job, or cannot be reached: {full[0].strip()[:500]}")
    return None


def _raised(text: str, cluster: SparkApplication, *, of_rows: bool) -> SparkDLError | None:
    """Return the error for a Python exception in Spark's text that sparkdl did not wrap itself."""
    blocks = list(BLOCK.finditer(text))
    if not blocks or "RefusedError: " in text:
        return None
    message = re.split(r"\n\s+at |\nDriver stacktrace|\nCaused by: ", text[blocks[-1].end() :])[0]
    name = re.match(rf"({RAISED})(?:: |\n|$)", message)
    short = name[1].rpartition(".")[2] if name else "Exception"
    reason = first_reason(message[name.end() :] if name else message)
    reason = memory.explained_by(f"{short}: {reason}" if reason else short, cluster.setting(memory.SETTING))
    if of_rows and "in task_main" not in text:
        return DataError(f"Spark could not compute the rows: {reason}", traceback=_tracebacks(text))
    task = re.search(r"[Tt]ask (\d+)\.\d+ in stage \S+ \(TID \d+\) \(([^ )]+)", text)
    worker, host = (int(task[1]), task[2]) if task else (-1, "")
    return WorkerError.of(reason, worker=worker, host=host, traceback=_tracebacks(text))


def _tracebacks(text: str) -> str:
    """Return the Python tracebacks in a text from Spark, without the Java text around them."""
    start = text.find("Traceback (most recent call last):")
    return re.split(r"\n\s+at [\w.$/]+\(|\nDriver stacktrace", text[max(start, 0) :])[0]


def _lost(text: str, cluster: SparkApplication) -> SparkDLError | None:
    """Return the error for a lost executor or process, from which a run may recover."""
    lines = re.findall(LOST, text)
    if lines and (died := re.search(r"Python worker exited unexpectedly[^\n.:]*", lines[-1])):
        limit = cluster.setting(memory.SETTING)
        limited = f"raise {memory.SETTING}={limit}, " if limit else ""
        return WorkerLostError(
            "A Python process of an executor crashed or was killed, most often by the operating system "
            f"because memory ran out. {_more_overhead(cluster)}, {limited}or use a smaller batch_size or "
            "fewer workers per executor. Spark says: "
            f"{died[0].strip()}."
        )
    return WorkerLostError(lines[-1].strip()[:1000]) if lines else None


def _of_the_plan(error: Exception, text: str, *, of_rows: bool) -> SparkDLError:
    """Return the error for any other failure of the query, of its rows or of the job."""
    words = _words(error, text)
    if isinstance(error, of_spark.AnalysisException):
        return ConfigError(f"Spark cannot run the query of the rows: {words}")
    of_java = isinstance(error, of_spark.PySparkException) or type(error).__module__.startswith("py4j")
    if of_rows and of_java:
        return DataError(f"Spark could not compute the rows: {words}")
    return ClusterError(f"Spark could not run the job: {words}")


def _words(error: Exception, text: str) -> str:
    """Return Spark's description of a failure, followed by the root cause if that adds something."""
    causes = [f"{kind.rpartition('.')[2]}: {message}" for kind, message in JAVA.findall(text) if message]
    plain = [cause for cause in causes if not WRAPPER.match(cause.partition(": ")[2])]
    first = str(error).strip().splitlines()[:1]
    if first and not re.match(r"An error occurred while calling|: ", first[0]):
        plain = [*first, *plain]
    found = plain[:1] or causes[-1:] or first or [type(error).__name__]
    root = next((cause for cause in reversed(plain) if cause.partition(": ")[2] not in found[0]), None)
    return found[0][:1000] if root is None else f"{found[0][:1000]} ({root[:500]})"


def lacks_package(error: SparkDLError) -> bool:
    """Return True if a job failed only because executors have no sparkdl."""
    return isinstance(error, PreflightError) and preflight.MISSING in str(error)


def refuses_barrier(error: SparkDLError) -> bool:
    """Return True if Spark refused a barrier stage on an RDD, such as a coalesced one."""
    return isinstance(error, ClusterError) and BARRIER_REFUSED in str(error)


def _more_overhead(cluster: SparkApplication) -> str:
    """Return the advice to double the memory overhead of an executor, to at least 1024 MiB.

    It says which overhead is in force. Sizes are in Spark's notation ("1024m").
    """
    units = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2}

    def mebibytes(text: str, default: float) -> float:
        match = re.fullmatch(r"(\d+)([kmgt])?b?", text.lower())
        return int(match[1]) * units[match[2] or "m"] if match else default

    factor = float(cluster.setting("spark.executor.memoryOverheadFactor", "0.1"))
    default = max(384, factor * mebibytes(cluster.setting("spark.executor.memory"), 1024))
    given = cluster.setting(memory.OVERHEAD)
    now = (
        given or f"Spark's default of {default:.0f}m, {factor:.0%} of spark.executor.memory and at least 384m"
    )
    most = max(2 * mebibytes(given, default), 1024)
    return f"Set {memory.OVERHEAD} to {most:.0f}m or more (now: {now})"
