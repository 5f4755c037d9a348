"""The command line of ``python -m sparkdl``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl import __version__


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the doctor.

    Attributes:
        master: the URL of the master, or of a Spark Connect server (``sc://``). None: the master in Spark's
            configuration; if there is none, this machine.
        num_workers: the number of workers.
        settings: settings of Spark, each as KEY=VALUE.
        timeout: maximum seconds for each step: the start of Spark, that of executors, and each job.
    """

    master: str | None
    num_workers: int
    settings: tuple[str, ...]
    timeout: float

    @property
    def remote(self) -> bool:
        """True for a Spark Connect server."""
        return (self.master or "").startswith("sc://")


def parse(arguments: Sequence[str] | None) -> Options:
    """Return the options of a command line; end the process if they are invalid.

    Args:
        arguments: the arguments; None: those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m sparkdl", description="Train Keras 3 models on Spark.")
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    doctor = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "doctor", help="check the installation, and train a small model on Spark"
    )
    doctor.add_argument(
        "--master",
        metavar="URL",
        help="the master, or a Spark Connect server (sc://host); default: as Spark is configured, or "
        "local[N] if no master is configured",
    )
    doctor.add_argument(
        "--num-workers", type=_count, default=2, metavar="N", help="the number of workers (default: 2)"
    )
    doctor.add_argument(
        "--conf",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark; may be repeated",
    )
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="maximum time for each step: the start of Spark, the registration of executors, and each job "
        "(default: 120)",
    )
    found = parser.parse_args(arguments)
    if "PYSPARK_GATEWAY_PORT" in os.environ and (found.master or found.conf):
        parser.error("spark-submit has started Spark: pass --master and --conf to spark-submit")
    return Options(
        master=found.master or os.environ.get("SPARK_REMOTE"),
        num_workers=found.num_workers,
        settings=tuple(found.conf),
        timeout=found.timeout,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0; got {text!r}")
    return seconds


def _setting(text: str) -> str:
    if not text.partition("=")[1]:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE; got {text!r}")
    return text
