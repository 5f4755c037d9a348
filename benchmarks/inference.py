"""Rows per second of ``transform`` compared with plain ``model.predict`` on the same cores.

Both predict MNIST's training images several times over, so that a job's start is a small part of the time,
and they alternate. Plain Keras predicts from an array, with a thread per core; KerasTransformer predicts from
a cached DataFrame of arrays of floats, with a task per core, into a sink that keeps nothing. The third
contestant is the time that Spark itself takes to hand the same rows to a Python function that does nothing
with them, a lower bound for any ``transform``.

    python benchmarks/inference.py --data MNIST_FOLDER --results benchmarks/RESULTS.md
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import spread, table, verdict

BAR = 0.85
BATCH = 1024


def frame_of(spark, x, folder: str):
    """Return the rows as a cached DataFrame with as many partitions as there are cores."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1]).cast(pa.list_(pa.float32()))
    path = str(Path(folder, "rows.parquet"))
    parquet.write_table(pa.table({"row": np.arange(len(x)), "features": rows}), path)
    frame = spark.read.parquet(path).repartition(os.cpu_count()).cache()
    frame.count()
    return frame


def moving(frame):
    """Return a DataFrame with one more column, from a Python function that only receives the rows."""
    import pyarrow as pa
    from pyspark.sql import functions

    def take(batches):
        for batch in batches:
            yield pa.array([0.0] * len(batch))

    take.__annotations__ = {"batches": Iterator[pa.Array], "return": Iterator[pa.Array]}
    return frame.withColumn("taken", functions.arrow_udf(take, "double")("features"))


def compute(frame) -> None:
    """Compute a whole DataFrame and discard it."""
    frame.write.format("noop").mode("overwrite").save()


def timed(function) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def compare(name: str, model, x, frame, rounds: int) -> list[list[str]]:
    """Return the lines of a model: each contestant's rows per second, and its ratio to plain Keras's."""
    from sparkdl.ml import KerasTransformer

    images = x.reshape(-1, *model.input_shape[1:])
    predicted = KerasTransformer(model=model, task="classification", inferenceBatchSize=BATCH).transform(
        frame
    )
    contestants = {
        "plain model.predict": lambda: model.predict(images, batch_size=BATCH, verbose=0),
        "transform": lambda: compute(predicted),
        "Spark alone, moving the rows": lambda: compute(moving(frame)),
    }
    seconds = {title: [] for title in contestants}
    for turn in range(rounds + 1):  # the first warms up
        for title, contestant in contestants.items():
            took = timed(contestant)
            if turn:
                seconds[title].append(took)
    rates = {title: [len(x) / each for each in found] for title, found in seconds.items()}
    plain = rates["plain model.predict"]
    lines = []
    for title, found in rates.items():
        part = statistics.median(ours / theirs for ours, theirs in zip(found, plain, strict=True))
        bar = verdict(f"≥ {BAR}", part >= BAR) if title == "transform" else ""
        lines.append([name, title, spread(found), f"{part:.2f}", bar])
    return lines


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of MNIST's four IDX .gz files")
    parser.add_argument(
        "--times", type=int, default=5, help="number of times that the rows repeat all images"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", help="Markdown file to write the section into")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np
    import problems
    from contestants import flat, read_idx
    from pyspark.sql import SparkSession

    x = np.tile(flat(read_idx(Path(options.data), "train")[0]), (options.times, 1))
    builder = SparkSession.builder.master(f"local[{os.cpu_count()}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "4g").getOrCreate()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        frame = frame_of(spark, x, folder)
        for name, model in (("MLP", problems.mlp()), ("CNN", problems.cnn())):
            lines += compare(name, model, x, frame, options.rounds)
    spark.stop()
    header = ["model", "", "rows/s", "ratio to plain Keras", "bar"]
    words = (
        f"{len(x):,} rows of {x.shape[1]} floats, batches of {BATCH}; medians of {options.rounds} turns "
        f"(lowest to highest). {harness.machine({'sparkdl': sys.executable})}"
    )
    title = "Inference: transform compared with model.predict"
    harness.report(title, f"{words}\n\n{table(header, lines)}", options.results)


if __name__ == "__main__":
    main()
