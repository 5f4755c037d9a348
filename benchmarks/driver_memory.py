"""Driver memory of a fit with few workers and with many, the first of which is the slowest.

Each measure runs in its own process, which makes a model of 25 million parameters, compiles it and starts
Spark on this machine. ``peak`` is how much more anonymous and shared memory it then holds at most during the
fit, in copies of the parameters. Spark's JVM and the workers are other processes. The first worker has half
of all rows, hence half of each batch, and finishes last in each round.

    python benchmarks/driver_memory.py --results benchmarks/RESULTS.md
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import harness
from contestants import Watch, held
from harness import spread, table, verdict

WIDTH, LAYERS = 2500, 4  # of square matrices: 25 million parameters
ROWS = 512
BARS = {"peak": 5.0, "apart": 1.0}
MODES = "synchronous", "asynchronous"


def rows_of(worker: int, num_workers: int):
    """Return a worker's rows: half of all for the first."""
    import numpy as np

    most = ROWS // 2
    count = most if worker == 0 else max(1, most // (num_workers - 1))
    return np.ones((count, WIDTH), np.float32), np.zeros((count, WIDTH), np.float32)


def measure(mode: str, workers: int) -> float:
    """Return the peak of a fit in copies of the parameters."""
    import keras
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    builder = SparkSession.builder.master(f"local[{workers}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "2g").getOrCreate()
    spark.range(10).count()
    idle = held(Path("/proc/self"))[0]
    with Watch(os.getpid()) as watch:
        SparkModel(model, mode=mode, frequency="batch", num_workers=workers).fit(
            rows_of, batch_size=ROWS if mode == "synchronous" else ROWS // 2, epochs=3, verbose=0
        )
    spark.stop()
    return (watch.peak - idle) / (4 * model.count_params())


def main() -> None:
    """Run the comparison, or one measure of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, nargs=2, default=(2, 16), help="two numbers of workers, small and large"
    )
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        mode, workers = options.one.split()
        print(json.dumps(measure(mode, int(workers))))
        return
    cases = [(mode, workers) for mode in MODES for workers in options.workers]
    peaks: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for round_, case in harness.interleave(cases, options.rounds):
        peaks[case].append(alone(*case))
        print(f"# round {round_} {case}: {peaks[case][-1]:.2f} copies", flush=True)
    lines = []
    for mode in MODES:
        few, many = (peaks[mode, workers] for workers in options.workers)
        apart = abs(statistics.median(many) - statistics.median(few))
        cells = [mode, *(spread(found, ".2f") for found in (few, many))]
        cells.append(verdict("≤ 5", max(map(statistics.median, (few, many))) <= BARS["peak"]))
        lines.append([*cells, f"{apart:.2f}", verdict("< 1", apart < BARS["apart"])])
    header = ["mode", *(f"K = {workers}" for workers in options.workers), "bar", "difference", "bar"]
    words = (
        f"{LAYERS} Dense layers, together {LAYERS * WIDTH**2:,} parameters, SGD, every batch, 3 epochs; the "
        f"peak above the idle driver in copies of the parameters ({LAYERS * WIDTH**2 / 250000:.0f} MB), "
        f"medians of {options.rounds} [min..max]. {harness.machine({'sparkdl': sys.executable})}"
    )
    harness.report("Memory of the driver", f"{words}\n\n{table(header, lines)}", options.results)


def alone(mode: str, workers: int) -> float:
    """Return a measure taken in a separate process."""
    command = [sys.executable, __file__, "--one", f"{mode} {workers}"]
    environment = harness.environment(harness.Spec("sparkdl"), sys.executable)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return float(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
