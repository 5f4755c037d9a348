"""Rows per second on a GPU, without Spark: one process with the endpoint, and separate worker processes.

Plain ``model.fit`` and 1, 2 and 4 workers train the same model on the same synthetic rows, on the backend
that KERAS_BACKEND names, in interleaved rounds. The processes are kept, as Spark keeps its own: a process
that trains in a round has already imported Keras and holds the GPU. The workers share the GPU. *Exchange* is
the extra time of a step with an exchange per batch over one with an exchange per epoch; *idle* is the share
of the time in which nvidia-smi sees no kernel run. Without a GPU all run on the CPU.

    KERAS_BACKEND=torch python benchmarks/gpu.py --models cnn transformer --results benchmarks/RESULTS.md
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import harness
import numpy as np

SETTINGS = [("plain", "", 1), *[("sparkdl", f, k) for k in (1, 2, 4) for f in ("batch", "epoch")]]
EPOCHS = 6  # the first compiles, and is not counted


def build(name, size):
    """Return a compiled model: a CNN of residual blocks on images, or a transformer on tokens."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if name == "cnn":
        inputs = keras.Input((32, 32, 3))
        x = layers.Conv2D(size, 3, padding="same")(inputs)
        for width in (size, 2 * size, 4 * size):
            skip = layers.Conv2D(width, 1, strides=2)(x)
            x = layers.BatchNormalization()(layers.Conv2D(width, 3, 2, "same", activation="relu")(x))
            x = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x))
            x = layers.ReLU()(layers.Add()([x, skip]))
        x = layers.GlobalAveragePooling2D()(x)
    else:
        inputs = keras.Input((32,), dtype="int32")
        x = layers.Embedding(1000, 4 * size)(inputs)
        for _ in range(2):
            seen = layers.MultiHeadAttention(4, size)(x, x)
            x = layers.LayerNormalization()(layers.Add()([x, seen]))
            wide = layers.Dense(4 * size)(layers.Dense(16 * size, "gelu")(x))
            x = layers.LayerNormalization()(layers.Add()([x, wide]))
        x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(10, "softmax")(x))
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def rows_for(name, count):
    """Return synthetic rows for a model."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, count)
    if name == "cnn":
        return random.random((count, 32, 32, 3), dtype=np.float32), labels
    return random.integers(0, 1000, (count, 32)).astype("int32"), labels


class Watch:
    """A stopwatch for the epochs after the first, and for the share of that time with an idle GPU."""

    def __init__(self):
        self.ends, self.samples, self.done = [], [], threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def end_epoch(self):
        """Record the end of an epoch."""
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1 and shutil.which("nvidia-smi"):
            self.thread.start()

    def _sample(self):
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self.done.wait(0.2):
            found = subprocess.run(query, capture_output=True, text=True)
            if found.returncode == 0 and not self.done.is_set():
                self.samples.append(float(found.stdout.split()[0]))

    def answer(self):
        """Return seconds per epoch, and the idle share; nan without nvidia-smi."""
        self.done.set()
        idle = 1 - statistics.fmean(self.samples) / 100 if self.samples else float("nan")
        return {"seconds": statistics.median(np.diff(self.ends)), "idle": idle}


def see(visible):
    """Let this process compute on the GPU, unlike the one with the endpoint."""
    if visible is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def plain(name, size, count, batch_size):
    """Measure model.fit."""
    import keras

    watch = Watch()
    x, y = rows_for(name, count)
    mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: watch.end_epoch())
    build(name, size).fit(x, y, batch_size, EPOCHS, verbose=0, callbacks=[mark])
    return watch.answer()


def work(worker, num_workers, endpoint, job, name, count):
    """Train as one worker."""
    from sparkdl.data.bad_values import Watched
    from sparkdl.data.batch_plan import even_split, ranks
    from sparkdl.data.blocks import TRAINING, Block
    from sparkdl.transport.exchange import Endpoint
    from sparkdl.worker.session import Attempt
    from sparkdl.worker.train import train_task
    from sparkdl.worker.user_code import Code

    x, y = rows_for(name, count)
    mine = ranks(even_split(count, num_workers), worker)
    block = Block(np.arange(len(mine), dtype=np.uint64), TRAINING, (x[mine], y[mine]))
    attempt = Attempt(worker, 1, os.cpu_count(), 1, Endpoint(*endpoint))
    train_task(job, attempt, Watched([block]), Code())


def group(pool, name, size, count, batch_size, frequency, num_workers):
    """Measure workers around an endpoint in this process."""
    import keras

    from sparkdl.data.batch_plan import BatchPlan
    from sparkdl.data.schema import Sample
    from sparkdl.modeling import keras_metrics, keras_variables, serialization
    from sparkdl.modeling.keras_variables import Layouts
    from sparkdl.rules import choose
    from sparkdl.server.aggregation import AggregationSpec, make_aggregation
    from sparkdl.server.coordinator import Coordinator
    from sparkdl.server.http_app import Traffic, make_app
    from sparkdl.server.http_server import serve
    from sparkdl.server.state import RunSpec
    from sparkdl.worker.strategies import TrainSettings
    from sparkdl.worker.train import TrainJob

    model, (x, y) = build(name, size), rows_for(name, 2)
    keras_metrics.build_metrics(model, x, y)
    joint, window = frequency == "batch", 1 if frequency == "batch" else None
    layouts, (spec, _) = Layouts.of(model), serialization.freeze(model)
    plan = BatchPlan((), 0, batch_size, window, joint, True, 0)
    rule, power = choose(None, mode="synchronous", window=window)
    shape = RunSpec(
        run=b"r" * 16,
        layout=layouts.trainable.digest,
        num_workers=num_workers,
        plan=plan,
        epochs=EPOCHS,
        metrics=keras_variables.layout_of(keras_variables.metric_variables(model)).nbytes,
        optimizer=layouts.optimizer.nbytes,
        generators=layouts.generators.nbytes,
    )
    center = layouts.trainable.pack(keras_variables.read(keras_variables.trainable(model)))
    held = layouts.statistics.pack(keras_variables.read(keras_variables.statistics(model)))
    coordinator = Coordinator(
        shape, make_aggregation(AggregationSpec("synchronous", joint, num_workers, rule), center, held)
    )
    schema = Sample.of((x[0], y[0]), (1, 1)).schema(keras.config.floatx())
    settings = TrainSettings(
        plan=plan,
        epochs=EPOCHS,
        rounds=True,
        validation_batch_size=batch_size,
        rule=rule,
        power=power,
    )
    job = TrainJob(spec=spec, settings=settings, schema=schema, layout=layouts.trainable.digest)
    watch = Watch()
    with serve(make_app(coordinator, "token", Traffic()), "127.0.0.1", 0, num_workers) as port:
        endpoint = "127.0.0.1", port, "token", b"r" * 16
        workers = [pool.submit(work, k, num_workers, endpoint, job, name, count) for k in range(num_workers)]
        for epoch in range(EPOCHS):
            coordinator.release(epoch, float("nan"))
            while (result := coordinator.wait_epoch(epoch, 0.1)) is None:
                if coordinator.failure is not None:
                    raise coordinator.failure
                for worker in workers:
                    if worker.done():
                        worker.result()  # raises the worker's error
            watch.end_epoch()
            coordinator.commit(result.snapshot)
        coordinator.stop()
        for worker in workers:
            worker.result()
    return watch.answer()


def measure(options, pool, name, setting):
    """Return the measures of one setting."""
    who, frequency, workers = setting
    common = name, options.size, options.rows, options.batch_size
    if who == "plain":
        return pool.submit(plain, *common).result()
    return group(pool, *common, frequency, workers)


def section(options, name, found):
    """Return the table of one model."""
    base = statistics.median(each["seconds"] for each in found["plain", "", 1])
    rows = []
    for (who, frequency, workers), answers in found.items():
        seconds = [each["seconds"] for each in answers]
        steps = -(-options.rows // options.batch_size)
        rest = [each["seconds"] for each in found.get((who, "epoch", workers), answers)]
        exchange = (statistics.median(seconds) - statistics.median(rest)) / steps * 1000
        rows.append(
            [
                f"{who} {frequency}".strip(),
                workers,
                harness.spread([options.rows / s for s in seconds]),
                f"{base / statistics.median(seconds):.2f}",
                f"{exchange:.2f}" if frequency == "batch" else "–",
                harness.spread([each["idle"] for each in answers], ".2f"),
            ]
        )
    header = ["", "workers", "rows/s", "/ plain Keras", "exchange, ms a step", "GPU idle"]
    return f"### {name}\n\n{harness.table(header, rows)}"


def main():
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn", "transformer"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="channels of the first block")
    parser.add_argument("--workers", type=int, default=4, help="maximum number of workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no round after this many minutes"
    )
    parser.add_argument("--results", help="Markdown file to write the section into")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(harness.REPOSITORY), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(harness.REPOSITORY))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    settings = [each for each in SETTINGS if each[2] <= options.workers]
    found = {name: {setting: [] for setting in settings} for name in options.models}
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    rounds = 0
    with ProcessPoolExecutor(options.workers, context, see, (visible,)) as pool:
        while rounds < options.rounds and time.monotonic() - began < 60 * options.minutes:
            for name in options.models:
                for index in range(len(settings)):
                    setting = settings[(index + rounds) % len(settings)]
                    answer = measure(options, pool, name, setting)
                    found[name][setting].append(answer)
                    print(f"# round {rounds} {name} {setting}: {answer}", flush=True)
            rounds += 1
    parts = [section(options, name, found[name]) for name in options.models]
    words = (
        f"Keras on {backend}, {options.rows:,} rows, batch {options.batch_size}, interleaved "
        f"rounds: {rounds}; medians [min..max], each of {EPOCHS - 1} epochs. {gpu_name()} "
        + harness.machine({backend: sys.executable})
    )
    harness.report(f"GPU: {backend}", "\n\n".join([words, *parts]), options.results)


def gpu_name():
    """Return the name of the GPU, if there is one."""
    if not shutil.which("nvidia-smi"):
        return "No GPU."
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return subprocess.check_output(query, text=True).strip() + "."


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
