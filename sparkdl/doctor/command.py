"""The doctor: the order of its checks, and its exit status."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkdl import __version__
from sparkdl.doctor import installation
from sparkdl.doctor.options import Options, parse
from sparkdl.doctor.report import Finding, Report, quiet

# Checks that are skipped if one that they depend on failed.
AFTER = "Keras", "Spark", "Slots", "Executors", "Endpoint", "Fit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``python -m sparkdl``; return the exit status.

    It is 1 if a check failed, 130 after Ctrl-C, and otherwise 0.

    Args:
        arguments: the arguments; None: those of this process.
    """
    options = parse(arguments)
    try:
        with quiet() as (terminal, log):
            report = Report(terminal)
            report.line(f"sparkdl {__version__}")
            try:
                examine(options, report, log)
            except KeyboardInterrupt:
                log.unlink()
                raise
            end(report, log)
    except KeyboardInterrupt:
        return 130
    return 1 if report.failed else 0


def examine(options: Options, report: Report, log: Path) -> None:
    """Run the checks. A check that depends on a failed one is skipped.

    Args:
        options: the options.
        report: the report that the lines are added to.
        log: the file with the output of Spark and of the backend.
    """
    sound = report.check("Python", installation.python)
    sound = report.check("Packages", installation.packages) and sound
    sound = report.check("sparkdl", installation.name) and sound
    report.check("Disk", installation.disk)
    if options.remote:
        report.check("Java", lambda: Finding("ok", "not checked: a Spark Connect server has its own"))
    else:
        sound = report.check("Java", installation.java) and sound
    if sound and report.check("Keras", installation.keras):
        examine_spark(options, report, log)


def examine_spark(options: Options, report: Report, log: Path) -> None:
    """Run the checks of a Spark application; the arguments are those of ``examine``."""
    from sparkdl.doctor.cluster import ClusterChecks  # imports Keras and PySpark

    cluster = ClusterChecks(options, log)
    try:
        if not report.check("Spark", cluster.start):
            return
        report.check("Slots", cluster.slots)
        if not cluster.num_workers or not report.check("Executors", cluster.executors):
            return
        if cluster.has_gpus:
            report.check("GPUs", cluster.gpus)
        if report.check("Endpoint", cluster.endpoint):
            report.check("Fit", cluster.fit)
    finally:
        cluster.stop()


def end(report: Report, log: Path) -> None:
    """Write the outcome, and the path of the log, which is removed if it is not needed."""
    if not report.failed or not log.stat().st_size:
        log.unlink()
    if not report.failed:
        warned = f", with a warning about {', '.join(report.warned)}" if report.warned else ""
        report.line(f"A fit works here{warned}.")
        return
    left_out = [name for name in AFTER if name not in report.checked]
    report.line(
        f"Failed: {', '.join(report.failed)}."
        + (f" Not checked: {', '.join(left_out)}." if left_out else "")
        + (f" The output of Spark and Keras is in {log}." if log.exists() else "")
    )
