"""Fit a model on an executor with a given memory limit for Python, and print the error's first line.

Arguments: the setting of the limit, the limit in MiB, and the number of units of each hidden layer.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pyspark
from pyspark.sql import SparkSession

from sparkdl import SparkModel
from sparkdl.errors import SparkDLError

setting, mebibytes, units = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
builder = SparkSession.builder.master("local-cluster[1,1,1024]").config("spark.ui.enabled", "false")
folder = tempfile.TemporaryDirectory()
if setting == "ulimit -v":
    python = Path(folder.name) / "python"
    python.write_text(f'#!/bin/sh\nulimit -v {mebibytes << 10}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    os.environ["PYSPARK_PYTHON"] = str(python)
else:
    builder = builder.config(setting, f"{mebibytes}m")
session = builder.getOrCreate()
session.sparkContext.setLogLevel("OFF")
model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(n) for n in (units, units, 1))])
model.compile("sgd", "mse")
try:
    SparkModel(model, num_workers=1).fit(np.ones((8, 8)), np.ones(8), verbose=0)
except SparkDLError as error:
    sys.stdout.write(f"{type(error).__name__}: {str(error).splitlines()[0]}\n")
application = session.sparkContext.applicationId
session.stop()
folder.cleanup()
home = Path(os.environ.get("SPARK_HOME", pyspark.__path__[0]))
shutil.rmtree(
    home / "work" / application, ignore_errors=True
)  # local-cluster writes here regardless of settings
