"""Measure leaks in a driver over many calls: memory, objects, threads, descriptors, JVM heap and files.

Each kind of call is repeated in its own process. Measures are taken every few calls, after garbage
collections in Python and in the JVM. ``slope`` is that of a least-squares line after the first ten calls, per
100 calls, with its 95 % interval. ``files`` are those below the process's own temporary folder, which Spark
uses too.

    python benchmarks/many_calls.py --results benchmarks/RESULTS.md
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import harness
from harness import table, verdict

CALLS = {
    "fit": 300,
    "fit, 40 MB": 300,
    "predict": 300,
    "transform": 300,
    "count in foreachBatch": 100,  # no fit: the heap that Spark itself keeps of a stream
    "fit in foreachBatch": 100,
}
FIRST = 10  # calls before the slopes begin
CONTROL = "count in foreachBatch"  # its slopes are added to the bars of the kind after it
MEASURES = "RSS, MB", "objects", "threads", "descriptors", "JVM heap, MB", "files"
SMALL, LARGE = 64, 3200  # widths of two Dense layers; the larger ones take 40 MB
ROWS = 256
BARS = dict(zip(MEASURES, (5.0, 500.0, 0.5, 0.5, 2.0, 1.0), strict=True))  # slopes per 100 calls


def model_of(width: int):
    """Return a compiled model of two Dense layers."""
    import keras

    layers = [keras.layers.Dense(width), keras.layers.Dense(width), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    return model


def measures_of(spark) -> list[float]:
    """Return the measures of this process and its application."""
    gc.collect()
    runtime = spark.sparkContext._jvm.java.lang.Runtime.getRuntime()
    runtime.gc()
    return [
        int(status_of("VmRSS")) / 1000,
        len(gc.get_objects()),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        (runtime.totalMemory() - runtime.freeMemory()) / 1e6,
        sum(len(files) for _, _, files in os.walk(tempfile.gettempdir())),
    ]


def status_of(name: str) -> str:
    """Return a value of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(name))


def measure(kind: str, calls: int) -> list[list[float]]:
    """Make the calls; return measures taken after some of them, each preceded by the number of calls."""
    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel
    from sparkdl.ml import KerasTransformer

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.retainedJobs", "10").config("spark.ui.retainedStages", "10")
    builder = builder.config("spark.sql.ui.retainedExecutions", "2").config("spark.driver.memory", "2g")
    builder = builder.config("spark.sql.streaming.numRecentProgressUpdates", "2")
    builder = builder.config("spark.local.dir", tempfile.gettempdir())
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    spark_model = SparkModel(model_of(LARGE if "40" in kind else SMALL), num_workers=2)
    transformer = KerasTransformer(model=spark_model.model)
    frame = spark.createDataFrame([(row.tolist(),) for row in x], ["features"])
    every, found = max(1, calls // 30), []

    def note(number: int) -> None:
        spark_model.training_histories.clear()  # one dict for each fit, as documented
        if number % every == 0:
            found.append([number, *measures_of(spark)])

    if "foreachBatch" in kind:
        folder = tempfile.mkdtemp()
        rows = spark.createDataFrame([(row.tolist(), float(t[0])) for row, t in zip(x, y, strict=True)])
        rows = rows.toDF("features", "label")
        rows.coalesce(1).write.parquet(f"{folder}/first")

        def train(batch, number: int) -> None:
            if "fit" in kind:
                spark_model.fit(batch, batch_size=64, verbose=0)
            else:
                batch.count()
            note(number + 1)

        for number in range(calls):
            os.link(next(Path(folder, "first").glob("*.parquet")), f"{folder}/{number:05d}.parquet")
        stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(folder)
        query = stream.writeStream.foreachBatch(train).trigger(availableNow=True).start()
        query.awaitTermination()
    else:
        for number in range(1, calls + 1):
            if kind == "predict":
                spark_model.predict(x, verbose=0)
            elif kind == "transform":
                transformer.transform(frame).collect()
            else:
                spark_model.fit(x, y, batch_size=64, verbose=0)
            note(number)
    spark.stop()
    keras.backend.clear_session()
    return found


def slope_of(found: list[list[float]], place: int) -> tuple[float, float]:
    """Return the slope of a measure per 100 calls after the first ten, and half of its 95 % interval."""
    import numpy as np

    rows = np.array(found)
    rows = rows[rows[:, 0] >= FIRST]
    calls, values = rows[:, 0] / 100, rows[:, 1 + place]
    centred = calls - calls.mean()
    slope = centred @ values / (centred @ centred)
    rest = values - values.mean() - slope * centred
    error = np.sqrt(rest @ rest / max(1, len(rows) - 2) / (centred @ centred))
    return float(slope), float(2 * error)


def main() -> None:
    """Run all kinds of calls, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="share of the calls to make")
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    calls = {kind: max(30, round(options.share * count)) for kind, count in CALLS.items()}
    if options.one:
        print(json.dumps(measure(options.one, calls[options.one])))
        return
    lines, bars = [], BARS
    for kind, count in calls.items():
        found = alone(kind, options.share)
        lines += lines_of(f"{kind} × {count}", found, bars)
        if kind == CONTROL:
            bars = {
                name: bar + max(0.0, slope_of(found, place)[0])
                for place, (name, bar) in enumerate(BARS.items())
            }
        print(f"# {kind}: done", flush=True)
    header = ["calls", "measure", f"after {FIRST} calls", "at the end", "slope per 100 calls", "bar"]
    words = (
        f"Two workers, {ROWS} rows. {harness.machine({'sparkdl': sys.executable})} The bars of the last kind "
        "include the slopes of a stream that only counts rows, which are Spark's own."
    )
    harness.report("Many calls in one driver", f"{words}\n\n{table(header, lines)}", options.results)


def lines_of(title: str, found: list[list[float]], bars: dict[str, float]) -> list[list[str]]:
    """Return the lines of the table for one kind of call."""
    lines = []
    first = next(row for row in found if row[0] >= FIRST)
    for place, name in enumerate(MEASURES):
        slope, interval = slope_of(found, place)
        level = slope - interval <= 0 or slope <= bars[name]
        ends = [f"{row[1 + place]:,.0f}" for row in (first, found[-1])]
        bar = "" if title.startswith(CONTROL) else verdict(f"0 ± noise, or ≤ {bars[name]:.1f}", level)
        lines.append([title, name, *ends, f"{slope:+,.1f} ± {interval:,.1f}", bar])
    return lines


def alone(kind: str, share: float) -> list[list[float]]:
    """Return the measures of a kind of call, made in a separate process with its own folder."""
    command = [sys.executable, __file__, "--one", kind, "--share", str(share)]
    with tempfile.TemporaryDirectory() as folder:
        environment = harness.environment(harness.Spec("sparkdl"), sys.executable) | {"TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
