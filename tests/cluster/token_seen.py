"""A job that looks for its own token; runs in its own process.

One fit trains, another one fails. Prints a line of JSON: the token and the places where it was seen: on a
command line or in an environment variable of this machine at an epoch's end, in the error of the failing fit,
and on the pages of Spark's UI, which include the executors' logs.
"""

import json
import os
import secrets
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from pyspark import TaskContext
from pyspark.sql import SparkSession

from sparkdl import SparkModel
from sparkdl.errors import WorkerError

PAGES = "jobs", "stages", "storage", "environment", "executors"


def failing(y_true, y_pred):
    """Return a loss that fails in tasks."""
    if TaskContext.get() is not None:
        raise RuntimeError("broken")
    return keras.losses.mean_squared_error(y_true, y_pred)


def pages(context):
    """Return the URLs of an application in Spark's UI and API, and of its executors' logs."""
    api = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
    stages = [(each["stageId"], each["attemptId"]) for each in json.loads(page(f"{api}/stages"))]
    logs = [each["executorLogs"].values() for each in json.loads(page(f"{api}/allexecutors"))]
    return [
        *(f"{context.uiWebUrl}/{name}/" for name in PAGES),
        *(f"{context.uiWebUrl}/stages/stage/?id={stage}&attempt={attempt}" for stage, attempt in stages),
        *(f"{api}/{name}" for name in ("jobs", "stages?details=true", "environment", "allexecutors", "sql")),
        *(url for urls in logs for url in urls),
    ]


def page(url):
    """Return the contents of a URL, bypassing any proxy in the environment."""
    with build_opener(ProxyHandler({})).open(url, timeout=60) as answer:
        return answer.read().decode()


def shown(text):
    """Return the processes with this text in their command line or environment."""
    found = []
    for file in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        with suppress(OSError):
            found += [str(file)] * (text.encode() in file.read_bytes())
    return found


token, seen = secrets.token_urlsafe(32), []
secrets.token_urlsafe = lambda size: token
builder = SparkSession.builder.master(sys.argv[1])
for setting in sys.argv[3:]:
    builder = builder.config(*setting.split("=", 1))
context = builder.getOrCreate().sparkContext
context.setLogLevel("OFF")

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((64, 1), np.float32)
look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.extend(shown(token)))
SparkModel(model, mode=sys.argv[2]).fit(x, x, verbose=0, callbacks=[look])
model.compile("sgd", failing)
try:
    SparkModel(model, mode=sys.argv[2]).fit(x, x, verbose=0)
except WorkerError:
    error = traceback.format_exc()
read = {url: page(url) for url in pages(context)}
seen += [name for name, text in [("the error", error), *read.items()] if token in text]
print("REPORT " + json.dumps({"token": token, "seen": seen, "error": error, "pages": read}))  # noqa: T201
