"""Rows per second and memory of the path of rows to a worker and into its batches.

1. Training: an MLP on one core, plain Keras from NumPy arrays and one worker with a DataFrame, both with
   one thread, in turns. "First" is a complete fit of one epoch, with Spark's shuffle and the
   worker's start; "later" are the epochs after the first, as ``contestants.measure`` defines them. Once
   with MNIST, and once with as many random rows as make 4 GB.
2. Memory during training: what a Python worker holds, without mapped files, above its level after importing
   Keras.
3. Ingestion: all of MNIST's training rows from a cached DataFrame as Arrow batches, from its ``rdd``, and
   from a cached RDD of pairs, into the files that epochs read, by as many tasks as there are cores.
4. Input work of two CNNs over 5 epochs on one core: the time in which a worker's own code reads batches from
   the files, plus the time of Arrow ingestion on one core, as a share of the total.

    python benchmarks/feed.py --data MNIST_FOLDER --results benchmarks/RESULTS.md
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import harness
from harness import Spec, spread, table, verdict

BARS = {"later": 0.95, "memory": 300, "arrow": 5.0, "pairs": 0.5, "input": 0.05}
EPOCHS = 5  # of the CNNs
ROW = 784 * 4 + 4


# --- training and memory ------------------------------------------------------------------------


def training(name: str, setting: Spec, results: list[list[str]]) -> None:
    """Add the lines of plain Keras and of a worker."""
    specs = [
        replace(setting, name="plain"),
        replace(setting, name="fed", mode="synchronous", frequency="epoch"),
    ]
    answers = harness.in_turns(specs, timeout=1800)
    for spec, answer in zip(specs, answers, strict=True):
        print(f"# {name}, {spec.title}: {harness.brief(answer)}", flush=True)
        if "error" in answer:
            raise SystemExit(answer["error"])
    plain = answers[0]["turns"]
    for spec, answer in zip(specs, answers, strict=True):
        share = [mine / other for mine, other in zip(answer["turns"], plain, strict=True)]
        cells = [name, spec.title, f"{answer['rows_per_second_first']:,.0f}", spread(answer["turns"])]
        cells += [spread(share, ".2f"), "", "", "", ""]
        if spec.name == "fed":
            rise = (answer["peak"] - answer["level"]) / 1e6
            cells[5] = verdict(f"{BARS['later']}", statistics.median(share) >= BARS["later"])
            cells[6:8] = [f"{rise:,.0f}", verdict(f"{BARS['memory']}", rise < BARS["memory"])]
            cells[8] = f"{answer['resident'] / 1e6:,.0f}"
        results.append(cells)


# --- ingestion ----------------------------------------------------------------------------------


def schema_of(width: int):
    """Return the schema of the rows."""
    from sparkdl.data.column import Column
    from sparkdl.data.schema import Schema

    return Schema((Column("x", (width,), "float32"), Column("y", (), "int32")), (0, 1))


def spill_batches(schema):
    """Return a function for ``mapInArrow`` that writes rows to files and yields their number."""

    def run(batches):
        import pyarrow as pa

        from sparkdl.data import arrow, blocks, spill

        file = spill.SpillFile(schema, spill.local_directory(), 1)
        columns = {blocks.TRAINING: schema.columns}
        file.extend(arrow.blocks_of_batches(batches, columns, 1))
        count = file.rows(blocks.TRAINING).count
        yield pa.RecordBatch.from_pydict({"rows": pa.array([count], pa.int64())})

    return run


def spill_pairs(schema):
    """Return a function of a partition's pairs that writes them to files and yields their number."""

    def run(partition, rows):
        from sparkdl.data import blocks, spill

        file = spill.SpillFile(schema, spill.local_directory(), 1)
        file.extend(blocks.blocks_of_rows(rows, schema, partition))
        yield file.rows(blocks.TRAINING).count

    return run


def ingestion(spark, x, y, rounds: int) -> dict[str, list[float]]:
    """Return the rows per second of each way into the files, turn by turn."""
    from pyspark.sql import functions

    from sparkdl.data import arrow
    from sparkdl.data.blocks import TRAINING

    schema, parts = schema_of(x.shape[1]), os.cpu_count()
    pairs = spark.sparkContext.parallelize(list(zip(x, y, strict=True)), parts).cache()
    with tempfile.TemporaryDirectory() as folder:
        frame = frame_of(spark, x, y, folder).repartition(parts).cache()
        frame.count()
    pairs.count()
    key = functions.monotonically_increasing_id().alias(arrow.KEY)
    keyed = frame.select("x", "y", key, functions.lit(TRAINING).cast("int").alias(arrow.PART))
    spill = spill_pairs(schema)
    ways = {
        "DataFrame, Arrow": lambda: sum(
            row["rows"] for row in keyed.mapInArrow(spill_batches(schema), "rows long").collect()
        ),
        "RDD of pairs": lambda: pairs.mapPartitionsWithIndex(spill).sum(),
        "df.rdd": lambda: frame.rdd.map(tuple).mapPartitionsWithIndex(spill).sum(),
    }
    rates = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first warms up
        for name, way in ways.items():
            seconds = timed(way, len(x))
            if turn:
                rates[name].append(len(x) / seconds)
    return rates


def frame_of(spark, x, y, folder: str):
    """Return rows as a DataFrame of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1]).cast(pa.list_(pa.float32()))
    parquet.write_table(pa.table({"x": rows, "y": y}), str(Path(folder, "rows.parquet")))
    return spark.read.parquet(folder)


def timed(function: Callable[[], int], expected: int) -> float:
    """Return the seconds of a call that must return ``expected`` rows."""
    began = time.perf_counter()
    if function() != expected:
        raise SystemExit("Some rows are missing.")
    return time.perf_counter() - began


def ingestion_lines(rates: dict[str, list[float]]) -> list[list[str]]:
    """Return the lines of the ways into the files."""
    arrow, lines = rates["DataFrame, Arrow"], []
    for name, found in rates.items():
        part = [mine / other for mine, other in zip(found, arrow, strict=True)]
        bar = ""
        if name == "RDD of pairs":
            bar = verdict(f"≥ {BARS['pairs']}", statistics.median(part) >= BARS["pairs"])
        elif name == "df.rdd":
            bar = verdict(f"≤ {1 / BARS['arrow']}", statistics.median(part) <= 1 / BARS["arrow"])
        lines.append([name, spread(found), spread(part, ".2f"), bar])
    return lines


# --- input work ---------------------------------------------------------------------------------


def input_work(x, y, core_seconds: float, name: str) -> list[str]:
    """Return the line of a model's input work.

    Args:
        x: images, flat.
        y: labels.
        core_seconds: seconds of Arrow ingestion of these rows on one core, Spark's part included.
        name: the model.
    """
    import numpy as np

    from sparkdl.data import blocks, spill
    from sparkdl.data.batch_plan import BatchPlan
    from sparkdl.data.blocks import Block
    from sparkdl.modeling.backends.choice import make_replica, prepare_backend

    prepare_backend(1)
    import contestants

    model = contestants.make_model(Spec("fed", model=name))
    replica = make_replica(model, joint=False)
    schema, began = schema_of(x.shape[1]), time.perf_counter()
    file = spill.SpillFile(schema, spill.local_directory(), 1)
    keys = blocks.scramble(np.arange(len(x), dtype=np.uint64), 1)
    size = 10_000
    file.extend(
        Block(keys[at : at + size], blocks.TRAINING, (x[at : at + size], y[at : at + size]))
        for at in range(0, len(x), size)
    )
    rows = file.rows(blocks.TRAINING)
    writing, gathering = time.perf_counter() - began, 0.0
    plan = BatchPlan((len(x),), 0, 128, None, False, True, 1)
    for epoch in range(-1, EPOCHS):  # the first compiles
        if not epoch:
            began, gathering = time.perf_counter(), 0.0
        start = time.perf_counter()
        order = plan.order(epoch + 1, rows.buckets)
        gathering += time.perf_counter() - start
        for span in plan.spans(0, 0):
            start = time.perf_counter()
            batch = rows.batch(order[span.start : span.stop])
            gathering += time.perf_counter() - start
            replica.step(batch)
        replica.read()
    steps = time.perf_counter() - began - gathering
    work = core_seconds + gathering
    share = work / (work + steps)
    seconds = [f"{core_seconds:.2f}", f"{writing:.2f}", f"{gathering:.2f}", f"{steps:.1f}"]
    return [name, *seconds, f"{share:.1%}", verdict(f"{BARS['input']:.0%}", share <= BARS["input"])]


# --- the whole ----------------------------------------------------------------------------------


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="", help="folder of MNIST's four IDX .gz files, or 'generated'")
    parser.add_argument("--rows", type=int, default=60_000, help="train on the first rows of MNIST only")
    parser.add_argument(
        "--gigabytes", type=float, default=4.0, help="gigabytes of generated rows; 0 for none"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--large-rounds", type=int, default=3, help="rounds with the generated rows")
    parser.add_argument("--results", help="Markdown file to write the section into")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    many = round(options.gigabytes * 1e9 / ROW)
    common = Spec(
        "", workers=1, cores=os.cpu_count(), pin=max(os.sched_getaffinity(0)), batch_size=128, epochs=1
    )
    trained: list[list[str]] = []
    mnist = replace(common, data=options.data, rows=options.rows, warm_epochs=3, turns=options.rounds)
    training(f"MNIST, {options.rows:,} rows", mnist, trained)
    if many:
        large = replace(common, data="generated", rows=many, warm_epochs=1, turns=options.large_rounds)
        training(f"{options.gigabytes:g} GB, {many:,} rows", large, trained)

    from contestants import load
    from pyspark.sql import SparkSession

    x, y = load(mnist)[0]
    builder = SparkSession.builder.master(f"local[{os.cpu_count()}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "4g").getOrCreate()
    rates = ingestion(spark, x, y, options.rounds)
    spark.stop()
    seconds = os.cpu_count() * len(x) / statistics.median(rates["DataFrame, Arrow"])
    work = [input_work(x, y, seconds, name) for name in ("convnet", "cnn")]
    report(options, trained, ingestion_lines(rates), work)


def report(options, trained: list[list[str]], ways: list[list[str]], work: list[list[str]]) -> None:
    """Print the section, and write it to the results file if there is one."""
    header = ["rows", "", "rows/s, first", "rows/s, later", "ratio to plain Keras", "bar", "rise, MB", "bar"]
    header.append("resident, MB")
    body = [
        f"Rows of 784 floats and a label; medians of {options.rounds} turns, with generated rows of "
        f"{options.large_rounds} [min..max]. {harness.machine({'sparkdl': sys.executable})}",
        "Training on one core, batch 128. The rise is that of a Python worker's anonymous and shared memory "
        "above its level after importing Keras; resident are the most pages it had, of mapped files too.",
        table(header, trained),
        f"Ingestion of {options.rows:,} rows:",
        table(["", "rows/s", "ratio to Arrow", "bar"], ways),
        f"Input work over {EPOCHS} epochs of {options.rows:,} rows, in seconds of one core. The convnet is "
        "the one for MNIST among Keras's own examples (32 and 64 filters); the CNN has strides and few "
        "filters (16 and 32), whose steps take as little as those of dense layers.",
        table(["", "Arrow ingestion", "of which writing", "batches", "steps", "input / total", "bar"], work),
    ]
    harness.report("Feed: rows to batches", "\n\n".join(body), options.results)


if __name__ == "__main__":
    main()
