"""Time fits with and without a live page that ten viewers follow.

The fits alternate in one driver. The viewers are one process of the lowest priority, with a stream of events
each. The ratio is that of the time of an epoch, within a turn.

    python benchmarks/page.py --results benchmarks/RESULTS.md
"""

import argparse
import contextlib
import http.client
import io
import os
import re
import statistics
import subprocess
import sys
import threading
import time

import harness
from harness import ratios, spread, table, verdict

WORKERS, VIEWERS, ROWS, EPOCHS = 16, 10, 16_000, 3
BAR = 1.01


def watch(link: str, streams: int) -> None:
    """Follow a run with this number of streams of events until it ends; print the number of events."""
    os.nice(19)
    host, port, path = re.fullmatch(r"http://(.+):(\d+)(/.*)", link).groups()
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    cookie = answer.headers["Set-Cookie"].split(";")[0]
    counts = []

    def follow() -> None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/events", headers={"Cookie": cookie})
        with contextlib.suppress(OSError, http.client.HTTPException):
            counts.append(sum(line.startswith(b"data:") for line in connection.getresponse()))

    threads = [threading.Thread(target=follow) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts))


class Link(io.StringIO):
    """An output that starts viewers once the link of the page is printed."""

    viewers: subprocess.Popen | None = None

    def write(self, text: str) -> int:
        found = re.search(r"http://\S+\?key=\S+", text)
        if found and self.viewers is None:
            command = [sys.executable, __file__, "--watch", found[0]]
            self.viewers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return super().write(text)


def main() -> None:
    """Run the comparison, or the viewers of one fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch, VIEWERS)
        return
    os.environ |= harness.environment(harness.Spec("sparkdl"), sys.executable)
    rows = []
    for mode in ("synchronous", "asynchronous"):
        without, watched, events = measure(mode, options.rounds)
        found = ratios(dict(enumerate(watched)), dict(enumerate(without)))
        middle = statistics.median(found)
        rows.append(
            [
                mode,
                f"{spread(without, '.3f')} s",
                f"{spread(watched, '.3f')} s",
                spread(found, ".3f"),
                verdict(f"≤ {BAR}", middle <= BAR),
                spread(events),
            ]
        )
    words = (
        f"{WORKERS} workers on local[{WORKERS}], {VIEWERS} viewers, {ROWS:,} rows, batch 64 "
        f"(16 per worker if asynchronous), {options.rounds} turns, medians [min..max]. "
        + harness.machine({"sparkdl": sys.executable})
    )
    header = ["mode", "an epoch, no page", "with the page and viewers", "ratio", "bar", "events received"]
    harness.report("The live page", f"{words}\n\n{table(header, rows)}", options.results)


def measure(mode: str, turns: int) -> tuple[list[float], list[float], list[int]]:
    """Return the seconds of an epoch in each turn, without and with the page, and the events received."""
    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    builder = SparkSession.builder.master(f"local[{WORKERS}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 64)).astype(np.float32)
    y = rng.integers(0, 10, ROWS)
    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.SGD(1e-6), "sparse_categorical_crossentropy", metrics=["accuracy"])
    batch = 64 if mode == "synchronous" else 16
    seconds: dict[bool, list[float]] = {False: [], True: []}
    events = []
    for turn in range(turns + 1):
        for dashboard in (False, True) if turn % 2 else (True, False):
            spark_model = SparkModel(model, mode=mode, num_workers=WORKERS, dashboard=dashboard)
            with contextlib.redirect_stdout(Link()) as link:
                history = spark_model.fit(x, y, batch_size=batch, epochs=EPOCHS, verbose=2)
            if turn:  # the first one warms up
                seconds[dashboard].append(statistics.median(history.training["epoch_seconds"]))
                if dashboard:
                    events.append(int(link.viewers.communicate()[0]))
            elif link.viewers:
                link.viewers.wait()
        print(f"# {mode}: turn {turn} of {turns}", flush=True)
        time.sleep(0.5)
    spark.stop()
    return seconds[False], seconds[True], events


if __name__ == "__main__":
    main()
