"""A fit with a joint start, and one that exchanges after every batch, over slow links between hosts.

Each host is a network namespace of this machine with a link of 100 Mbit/s (``links.py``): one for the driver
and the master of a standalone cluster, one for each of two workers. The fits of a seed begin with the same
weights and have the same epochs. Seconds are those of ``fit``, after a first fit that starts the workers.
Accuracies are those of the 10,000 test rows. The program needs root, as ``links.py`` does.

    sudo python benchmarks/slow_link.py --data FOLDER --results benchmarks/RESULTS.md
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import links
from harness import ratios, spread, table, verdict

FREQUENCIES = "batch", "auto"
RATE, FASTER = "100mbit", 5.0
ROWS, BATCH = 12_000, 64


def data_of(folder: str):
    """Return Fashion-MNIST: the first training rows and the test rows, each with pixels from 0 to 1."""
    import problems

    (x, y), (test_x, test_y) = problems.PROBLEMS["fashion"].load(folder)
    return (x[:ROWS].reshape(ROWS, -1), y[:ROWS]), (test_x.reshape(len(test_x), -1), test_y)


def fit(frequency: str, seed: int, epochs: int, rows, test) -> tuple[float, float, int]:
    """Train; return the seconds, the accuracy and the number of rounds."""
    import keras

    from sparkdl import SparkModel

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((784,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    began = time.perf_counter()
    history = SparkModel(model, frequency=frequency, num_workers=2).fit(
        *rows, batch_size=BATCH, epochs=epochs, seed=seed, verbose=0
    )
    seconds = time.perf_counter() - began
    return seconds, model.evaluate(*test, verbose=0)[1], history.training["version"]


def measure(options) -> None:
    """Start the cluster, whose links are limited already, and run all fits."""
    sys.path.insert(0, str(harness.REPOSITORY / "tests"))
    from pyspark.sql import SparkSession
    from standalone import Standalone

    driver, *hosts = (links.address_of(host) for host in range(3))
    inside = {host: ("ip", "netns", "exec", f"{links.NAME}{at}") for at, host in enumerate(hosts, 1)}
    rows, test = data_of(options.data)
    with tempfile.TemporaryDirectory() as folder, Standalone(Path(folder), driver, inside) as cluster:
        settings = {
            "spark.driver.host": driver,
            "spark.driver.bindAddress": driver,
            "spark.ui.enabled": "false",
        }
        builder = SparkSession.builder.master(cluster.url)
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        fit("batch", 0, 1, tuple(part[:256] for part in rows), test)
        found = {frequency: {} for frequency in FREQUENCIES}
        for seed in options.seeds:
            for frequency in FREQUENCIES:
                found[frequency][seed] = fit(frequency, seed, options.epochs, rows, test)
                print(f"# {frequency} seed {seed}: {found[frequency][seed]}", flush=True)
        spark.stop()
    report(options, found)


def report(options, found: dict[str, dict[int, tuple[float, float, int]]]) -> None:
    """Print the table."""
    seconds = {name: {seed: one[0] for seed, one in each.items()} for name, each in found.items()}
    faster = statistics.median(ratios(seconds["batch"], seconds["auto"]))
    lines = []
    for name, each in found.items():
        accuracy = statistics.fmean(one[1] for one in each.values())
        bar = verdict(f"≥ {FASTER:.0f}", faster >= FASTER) if name == "auto" else ""
        ratio = f"{faster:.1f}" if name == "auto" else "1"
        rounds = next(iter(each.values()))[2]
        lines.append(
            [name, spread(seconds[name].values(), ".1f"), ratio, bar, f"{accuracy:.4f}", f"{rounds:,}"]
        )
    header = ["frequency", "seconds per fit", "times as fast", "bar", "accuracy", "rounds"]
    seeds = ", ".join(map(str, options.seeds))
    words = (
        f"Two workers and the driver, each behind a link of {RATE} in each direction; an MLP of 101,770 "
        f"parameters, {ROWS:,} rows of Fashion-MNIST, batches of {BATCH}, Adam, {options.epochs} epochs, "
        f"seeds {seeds}. {harness.machine({'sparkdl': sys.executable})}"
    )
    harness.report("A joint start over slow links", f"{words}\n\n{table(header, lines)}", options.results)


def main() -> None:
    """Limit the links, and run this program again on the driver's host."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with fashion-mnist/")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options)
        return
    before = "ip", "netns", "exec", f"{links.NAME}0"
    environment = os.environ | {"SPARK_LOCAL_IP": links.address_of(0), "PYSPARK_PYTHON": sys.executable}
    with links.network(3, RATE):
        subprocess.run([*before, sys.executable, *sys.argv, "--inside"], env=environment, check=True)


if __name__ == "__main__":
    main()
