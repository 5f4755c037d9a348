"""Images per second on a GPU, without Spark: one process with the endpoint, and worker processes beside it.

Plain ``model.fit`` and 1, 2 and 4 workers train the same model on the same made-up rows, on whatever
backend KERAS_BACKEND names, each setting in processes of its own, in interleaved rounds. The workers share
the GPU. *Exchange* is what a step takes longer with an exchange per batch than with one per epoch; *idle*
is the share of the time in which nvidia-smi sees no kernel run. Without a GPU all run on the CPU.

    KERAS_BACKEND=torch python benchmarks/gpu.py --models cnn transformer --results benchmarks/RESULTS.md
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
import numpy as np

SETTINGS = [("plain", "", 1), *[("sparkdl", f, k) for k in (1, 2, 4) for f in ("batch", "epoch")]]
EPOCHS = 4  # the first compiles, and is not counted


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
    """Return made-up rows for a model."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, count)
    if name == "cnn":
        return random.random((count, 32, 32, 3), dtype=np.float32), labels
    return random.integers(0, 1000, (count, 32)).astype("int32"), labels


class Idle:
    """The share of the time in which the GPU runs nothing, by nvidia-smi; nan where there is none."""

    def __enter__(self):
        self.samples, self.done = [], threading.Event()
        self.thread = threading.Thread(target=self._sample)
        if shutil.which("nvidia-smi"):
            self.thread.start()
        return self

    def _sample(self):
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self.done.wait(0.2):
            found = subprocess.run(query, capture_output=True, text=True)
            if found.returncode == 0:
                self.samples.append(float(found.stdout.split()[0]))

    def __exit__(self, *exception):
        self.done.set()
        if self.thread.is_alive():
            self.thread.join()

    @property
    def share(self):
        busy = self.samples[len(self.samples) // EPOCHS :]
        return 1 - statistics.fmean(busy) / 100 if busy else float("nan")


def plain(name, size, count, batch_size):
    """Return seconds per epoch of model.fit."""
    import keras

    ends = []
    x, y = rows_for(name, count)
    mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    build(name, size).fit(x, y, batch_size, EPOCHS, verbose=0, callbacks=[mark])
    return statistics.median(np.diff(ends))


def work(worker, num_workers, endpoint, job, name, count, visible):
    """Train as one worker, in a process of its own that sees the GPU."""
    if visible is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from sparkdl.batches import even_split, ranks
    from sparkdl.exchange import Endpoint
    from sparkdl.feed import TRAINING, Block
    from sparkdl.worker import Code, Task, train_task

    x, y = rows_for(name, count)
    mine = ranks(even_split(count, num_workers), worker)
    block = Block(np.arange(len(mine), dtype=np.uint64), TRAINING, (x[mine], y[mine]))
    train_task(job, Task(worker, 1, os.cpu_count(), 1, Endpoint(*endpoint)), [block], Code({}))


def gang(name, size, count, batch_size, frequency, num_workers, visible):
    """Return seconds per epoch of workers around an endpoint in this process."""
    import keras

    from sparkdl import models
    from sparkdl.batches import Plan
    from sparkdl.books import RunShape
    from sparkdl.merging import Terms, make_merging
    from sparkdl.rules import choose
    from sparkdl.schema import Sample
    from sparkdl.server import Traffic, make_app, serve
    from sparkdl.steppers import TrainSettings
    from sparkdl.store import ParameterStore
    from sparkdl.worker import TrainJob

    model, (x, y) = build(name, size), rows_for(name, 2)
    models.build_metrics(model, x, y)
    joint, window = frequency == "batch", 1 if frequency == "batch" else None
    layouts, (spec, _) = models.Layouts.of(model), models.freeze(model)
    plan = Plan((), 0, batch_size, window, joint, True, 0)
    rule, power = choose(None, mode="synchronous", window=window)
    shape = RunShape(
        run=b"r" * 16, layout=layouts.trainable.digest, num_workers=num_workers, plan=plan, epochs=EPOCHS,
        metrics=models.layout_of(models.metric_variables(model)).nbytes,
        optimizer=layouts.optimizer.nbytes, generators=layouts.generators.nbytes,
    )  # fmt: skip
    center = layouts.trainable.pack(models.read(models.trainable(model)))
    held = layouts.statistics.pack(models.read(models.statistics(model)))
    store = ParameterStore(shape, make_merging(Terms("synchronous", joint, num_workers, rule), center, held))
    schema = Sample.of((x[0], y[0]), (1, 1)).schema(keras.config.floatx())
    settings = TrainSettings(plan, EPOCHS, True, batch_size, rule, power)
    job = TrainJob(spec, settings, schema, layouts.trainable.digest)
    ends, context = [], multiprocessing.get_context("spawn")
    with serve(make_app(store, "token", Traffic()), "127.0.0.1", 0, num_workers) as port:
        endpoint = "127.0.0.1", port, "token", b"r" * 16
        arguments = [(k, num_workers, endpoint, job, name, count, visible) for k in range(num_workers)]
        workers = [context.Process(target=work, args=each) for each in arguments]
        for worker in workers:
            worker.start()
        for epoch in range(EPOCHS):
            store.release(epoch, float("nan"))
            while (result := store.wait_epoch(epoch, 0.1)) is None:
                if store.failure is not None:
                    raise store.failure
            ends.append(time.perf_counter())
            store.commit(result.cut)
        store.stop()
        for worker in workers:
            worker.join()
    return statistics.median(np.diff(ends))


def measure(options, name, setting, visible):
    """Return what one setting measures, run in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([name, *setting])]
    command += [
        "--rows",
        str(options.rows),
        "--batch-size",
        str(options.batch_size),
        "--size",
        str(options.size),
    ]
    variables = dict(os.environ, PYTHONPATH=str(harness.REPOSITORY), TF_CPP_MIN_LOG_LEVEL="3")
    if setting[0] != "plain":
        variables.update(CUDA_VISIBLE_DEVICES="-1", GPU_VISIBLE=json.dumps(visible))
    with Idle() as idle:
        run = subprocess.run(command, capture_output=True, text=True, env=variables)
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])
    return {"seconds": float(run.stdout.splitlines()[-1]), "idle": idle.share}


def one(options):
    """Run one setting in this process and print its seconds per epoch."""
    name, who, frequency, workers = json.loads(options.one)
    common = name, options.size, options.rows, options.batch_size
    if who == "plain":
        print(plain(*common))
    else:
        print(gang(*common, frequency, workers, json.loads(os.environ["GPU_VISIBLE"])))


def section(options, name, visible):
    """Return the table of one model."""
    settings = [each for each in SETTINGS if each[2] <= options.workers]
    found = {setting: [] for setting in settings}
    for round_ in range(options.rounds):
        for index in range(len(settings)):
            setting = settings[(index + round_) % len(settings)]
            found[setting].append(measure(options, name, setting, visible))
            print(f"# round {round_} {name} {setting}: {found[setting][-1]}", flush=True)
    base = statistics.median(each["seconds"] for each in found["plain", "", 1])
    rows = []
    for (who, frequency, workers), answers in found.items():
        seconds = [each["seconds"] for each in answers]
        steps = -(-options.rows // options.batch_size)
        rest = [each["seconds"] for each in found.get((who, "epoch", workers), answers)]
        exchange = (statistics.median(seconds) - statistics.median(rest)) / steps * 1000
        rows.append([
            f"{who} {frequency}".strip(), workers, harness.spread([options.rows / s for s in seconds]),
            f"{base / statistics.median(seconds):.2f}", f"{exchange:.2f}" if frequency == "batch" else "–",
            harness.spread([each["idle"] for each in answers], ".2f"),
        ])  # fmt: skip
    header = ["", "workers", "rows/s", "/ plain Keras", "exchange, ms a step", "GPU idle"]
    return f"### {name}\n\n{harness.table(header, rows)}"


def main():
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn", "transformer"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="channels of the first block")
    parser.add_argument("--workers", type=int, default=4, help="no more than so many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", help="the Markdown file whose section is to be replaced")
    parser.add_argument("--one", help="run one setting here; for the script itself")
    options = parser.parse_args()
    if options.one:
        one(options)
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    parts = [section(options, name, visible) for name in options.models]
    words = (
        f"Keras on {backend}, {options.rows:,} rows, batch {options.batch_size}, {options.rounds} "
        f"interleaved rounds; medians [min..max]. {gpu_name()} " + harness.machine({backend: sys.executable})
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
