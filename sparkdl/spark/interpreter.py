"""The Python that executors run if the user chose none.

PySpark takes the first ``python3`` on PATH unless PYSPARK_PYTHON is set before the SparkContext is created.
If the driver runs in a virtual environment that is not activated, that is a different Python. This module
makes executors on the driver's machine run the driver's Python instead.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from sparkdl.spark import spark_internals

UNCHOSEN = "python3"  # PySpark's default
OF_FRAMES = "spark.sql.execution.pyspark.python"  # overrides the Python that a function was made with
_adopted: WeakSet[Any] = WeakSet()  # SparkContexts whose Python was chosen here


def adopt(session: Any, *, here: bool) -> None:
    """Set the Python that executors run, unless the user chose one.

    It becomes ``spark.pyspark.python`` if that is set, else the driver's Python if executors are on this
    machine.

    Args:
        session: a classic SparkSession. UDFs that were made earlier run on the new Python as well.
        here: whether executors are on this machine.
    """
    context = session.sparkContext
    if context not in _adopted:
        if "PYSPARK_PYTHON" in os.environ or context.pythonExec != UNCHOSEN:
            return
        # PySpark itself reads this setting only where spark-submit starts the driver.
        python = context.getConf().get("spark.pyspark.python") or (here and sys.executable)
        if not python:
            return
        context.pythonExec = python
        _adopted.add(context)
    if context.pythonExec != UNCHOSEN and session.conf.get(OF_FRAMES, None) is None:
        session.conf.set(OF_FRAMES, context.pythonExec)


def rebind(data: Any, context: Any) -> None:
    """Switch the functions in the lineage of an RDD or a DataFrame to the Python that ``adopt`` chose.

    PySpark records the Python of a function when it hands the function to the JVM. It does so early for a
    list that becomes a DataFrame, and for an RDD that is cached or shuffled.

    Args:
        data: an RDD, or a DataFrame of a classic session.
        context: its SparkContext.
    """
    if context not in _adopted:
        return
    with suppress(Exception):  # in a version of Spark where this is not possible, functions keep their Python
        spark_internals.set_python(data, UNCHOSEN, context.pythonExec)
