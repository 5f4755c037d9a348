"""Fits a model on an executor with a given memory limit for Python, and prints the error's first line."""

import os
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pyspark
from pyspark.sql import SparkSession

from sparkdl import SparkModel
from sparkdl.errors import SparkDLError

memory, units = sys.argv[1], int(sys.argv[2])
builder = SparkSession.builder.master("local-cluster[1,1,1024]").config("spark.ui.enabled", "false")
session = builder.config("spark.executor.pyspark.memory", memory).getOrCreate()
session.sparkContext.setLogLevel("OFF")
model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(n) for n in (units, units, 1))])
model.compile("sgd", "mse")
try:
    SparkModel(model, num_workers=1).fit(np.ones((8, 8)), np.ones(8), verbose=0)
except SparkDLError as error:
    sys.stdout.write(f"{type(error).__name__}: {str(error).splitlines()[0]}\n")
application = session.sparkContext.applicationId
session.stop()
home = Path(os.environ.get("SPARK_HOME", pyspark.__path__[0]))
shutil.rmtree(
    home / "work" / application, ignore_errors=True
)  # local-cluster writes here regardless of settings
