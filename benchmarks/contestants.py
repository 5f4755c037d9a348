"""One contestant, in this process: ``contestants.py SPEC`` trains and prints one JSON line.

All train the same task, MNIST, from initial weights that depend on the seed: an MLP 784-128-128-10 with
dropout 0.2, or a small convolutional network with BatchNormalization. Every contestant is reduced to
``fit(epochs)``, and all are timed by one definition (see ``measure``), so that the measurement favours none.

Keras, Spark, sparkdl and Elephas are imported where they are used: the file runs in two environments, and
threads and cores are set before TensorFlow starts.
"""

import atexit
import contextlib
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import harness
import numpy as np
from harness import Spec

GENERATED = "generated"  # instead of a folder: as many random rows as requested
STRETCH = 10_000

# --- the task -----------------------------------------------------------------------------------


def load(spec: Spec):
    """Return (x, y), (x_test, y_test): this contestant's rows of MNIST, and the test set."""
    if spec.data == GENERATED:
        x, y = np.empty((spec.rows, 784), np.float32), np.empty(spec.rows, np.int32)
        for start, (some, labels) in zip(range(0, spec.rows, STRETCH), generated(spec.rows), strict=True):
            x[start : start + STRETCH], y[start : start + STRETCH] = some, labels
        return (x, y), (x[:1000], y[:1000])
    if spec.data:
        (x, y), test = [read_idx(Path(spec.data), part) for part in ("train", "t10k")]
    else:
        import keras

        (x, y), test = keras.datasets.mnist.load_data()
    first, step = spec.share
    rows = np.arange(len(x))[first : spec.rows or None : step]
    if spec.shuffled:
        np.random.default_rng(spec.seed).shuffle(rows)
    if spec.by_label:
        rows = rows[np.argsort(y[rows], kind="stable")]
    return (flat(x[rows]), y[rows].astype("int32")), (flat(test[0]), test[1].astype("int32"))


def generated(rows: int) -> Iterator[tuple]:
    """Yield (x, y) in stretches of random rows: noise, brighter at the position of the label."""
    for start in range(0, rows, STRETCH):
        rng, count = np.random.default_rng(start), min(STRETCH, rows - start)
        x, y = rng.random((count, 784), np.float32), rng.integers(10, size=count, dtype=np.int32)
        x[np.arange(count), y] += 1
        yield x, y


def read_idx(folder: Path, part: str):
    """Return the images and labels of one part of MNIST from its IDX gzip files."""
    images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    y = np.frombuffer(labels, np.uint8, offset=8)
    return np.frombuffer(images, np.uint8, offset=16).reshape(len(y), 28, 28), y


def flat(images):
    """Return images as rows of 784 numbers between 0 and 1."""
    return images.reshape(len(images), 784).astype("float32") / 255


def make_model(spec: Spec, keras=None):
    """Return the compiled model, of Keras 3 or of another Keras."""
    if keras is None:
        import keras

    optimizer = {
        "sgd": keras.optimizers.SGD(0.1 * spec.rate),
        "adam": keras.optimizers.Adam(1e-3 * spec.rate),
    }
    models = {"mlp": mlp, "cnn": cnn, "strided": strided, "convnet": convnet}
    hidden = models[spec.model](keras.layers)
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10, activation="softmax")])
    model.compile(optimizer[spec.optimizer], "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def mlp(layers) -> list:
    """Return two dense layers, each with dropout."""
    return [
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.2),
    ]


def cnn(layers) -> list:
    """Return two convolutions, each with BatchNormalization."""
    found = [layers.Reshape((28, 28, 1))]
    for filters in (16, 32):
        found += [layers.Conv2D(filters, 3, strides=2, use_bias=False), layers.BatchNormalization()]
        found.append(layers.Activation("relu"))
    return [*found, layers.Flatten()]


def strided(layers) -> list:
    """Return two convolutions with strides."""
    found = [layers.Conv2D(filters, 3, strides=2, activation="relu") for filters in (16, 32)]
    return [layers.Reshape((28, 28, 1)), *found, layers.Flatten()]


def convnet(layers) -> list:
    """Return the convolutions of the convnet for MNIST among Keras's own examples."""
    found = [layers.Reshape((28, 28, 1))]
    for filters in (32, 64):
        found += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()]
    return [*found, layers.Flatten(), layers.Dropout(0.5)]


def lowest_variance(model) -> dict:
    """Return the lowest moving variance, if the model has any."""
    variances = [v for v in model.non_trainable_variables if v.path.endswith("moving_variance")]
    return {"lowest_variance": min(float(v.numpy().min()) for v in variances)} if variances else {}


def initial(spec: Spec):
    """Return the model with the seed's initial weights, and their digest."""
    import keras

    keras.utils.set_random_seed(spec.seed)
    model = make_model(spec)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights()))
    return model, digest.hexdigest()[:12]


def accuracy(model, test) -> float:
    """Return the driver's model's accuracy on the test set."""
    x, y = test
    return float((model.predict(x, batch_size=1000, verbose=0).argmax(axis=1) == y).mean())


# --- the clock ----------------------------------------------------------------------------------


def measure(spec: Spec, rows: int, fit: Callable[[int], list], test: Callable[[], float]) -> dict:
    """Time ``fit(epochs)`` in two ways; the accuracy is that after the first call.

    ``rows_per_second_first``: the first fit of the session with everything in it, worker start and
    compilation included. ``rows_per_second_warm``: ``warm_epochs`` more epochs in another fit of the same
    session, timed from the end of its first epoch to the end of its last; the median of ``turns`` such fits.
    A contestant that does not report the ends of epochs is timed with a fit of 1 + ``warm_epochs`` epochs
    less a fit of 1 epoch.
    """
    first, _ = timed(spec, fit, spec.epochs)
    answer = {"rows_per_second_first": rows * spec.epochs / first, "seconds_first": first, "accuracy": test()}
    if spec.warm_epochs:
        warm = [rows * spec.warm_epochs / warm_seconds(spec, fit) for _ in range(spec.turns)]
        answer.update(rows_per_second_warm=statistics.median(warm), turns=warm)
    return answer


def warm_seconds(spec: Spec, fit: Callable[[int], list]) -> float:
    """Return the seconds of a fit's epochs after the first one."""
    whole, ends = timed(spec, fit, 1 + spec.warm_epochs)
    return ends[-1] - ends[0] if ends else whole - timed(spec, fit, 1)[0]


def timed(spec: Spec, fit: Callable[[int], list], epochs: int) -> tuple[float, list]:
    """Return the wall time of ``fit(epochs)``, started when the gate opens, and its result."""
    gate(spec)
    start = time.perf_counter()
    ends = fit(epochs)
    return time.perf_counter() - start, ends


def gate(spec: Spec) -> None:
    """Wait at the gate for this contestant's turn."""
    if spec.gated:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("The benchmark process has ended.")


def epoch_clock():
    """Return a list, and a Keras callback that appends the time of each epoch's end to it."""
    import keras

    ends: list[float] = []
    mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    return ends, mark


# --- contestants --------------------------------------------------------------------------------


def plain(spec: Spec) -> dict:
    """Run ``model.fit`` in this process, on the cores it was given.

    Keras is imported and the model is made before the clock starts, as on sparkdl's driver. In a gated
    process, such as those of the ceiling, both are part of the first fit: such a process stands for a worker.
    """
    (x, y), test = load(spec)
    made = functools.cache(lambda: initial(spec))
    if not spec.gated:
        made()

    def fit(epochs):
        model, _ = made()
        ends, clock = epoch_clock()
        model.fit(x, y, batch_size=spec.batch_size, epochs=epochs, verbose=0, callbacks=[clock])
        return ends

    answer = measure(spec, len(x), fit, lambda: accuracy(made()[0], test))
    return answer | {"initial": made()[1]} | lowest_variance(made()[0])


def ceiling(spec: Spec) -> dict:
    """Run independent ``model.fit`` processes, one pinned per core, each with its share of the rows.

    Their fits begin together, the first one with the import of Keras. The result is the sum of their rates:
    the most that K workers without any exchange could do.
    """
    cores = sorted(os.sched_getaffinity(0))[: spec.workers]
    shares = [
        replace(spec, name="plain", share=(k, len(cores)), pin=core, gated=True)
        for k, core in enumerate(cores)
    ]
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(harness.Contestant(share)) for share in shares]
        for _ in range(2 if spec.warm_epochs else 1):
            for child in children:
                child.ready()
            for child in children:
                child.go()
        answers = [child.end() for child in children]
    for answer in answers:
        if "error" in answer:
            raise SystemExit(answer["error"])
    rates = [key for key in answers[0] if key.startswith("rows_per_second")]
    return {key: sum(answer[key] for answer in answers) for key in rates}


def elephas(spec: Spec) -> dict:
    """Run Elephas as in its README: with an RDD of (x, y) pairs made before the clock starts.

    An asynchronous model of Elephas fits once (its server's process cannot start again), so each fit has its
    own SparkModel around the same Keras model, made outside the clock, on its own port. ``num_workers`` is
    left out and the RDD has as many partitions. That spares Elephas a shuffle of all rows in every fit.
    """
    from elephas.spark_model import AsynchronousSparkModel, SparkModel
    from elephas.utils.rdd_utils import to_simple_rdd

    (x, y), test = load(spec)
    model, weights = initial(spec)
    rdd = to_simple_rdd(start_spark(spec).sparkContext, x, y)

    def distributed():
        if spec.mode == "synchronous":
            return SparkModel(model)
        settings = {"mode": spec.mode, "frequency": spec.frequency, "port": free_port()}
        return AsynchronousSparkModel(model, parameter_server_mode="http", **settings)

    waiting = [distributed() for _ in range(1 + 2 * spec.turns)]

    def fit(epochs):
        waiting.pop(0).fit(rdd, epochs=epochs, batch_size=spec.batch_size, verbose=0)
        return []  # its callbacks run inside the workers, each in a fit of one epoch

    return measure(spec, len(x), fit, lambda: accuracy(model, test)) | {"initial": weights}


def sparkdl(spec: Spec) -> dict:
    """Run sparkdl with the same RDD of (x, y) pairs as Elephas, made before the clock starts."""
    from sparkdl import SparkModel

    (x, y), test = load(spec)
    model, weights = initial(spec)
    rdd = start_spark(spec).sparkContext.parallelize(list(zip(x, y, strict=True)))
    settings = {"mode": spec.mode, "frequency": spec.frequency, "merge": spec.merge}
    distributed = SparkModel(model, num_workers=spec.workers, **settings)
    training = []

    def fit(epochs):
        ends, clock = epoch_clock()
        settings = {"batch_size": spec.batch_size, "epochs": epochs, "seed": spec.seed}
        history = distributed.fit(rdd, verbose=0, callbacks=[clock], **settings)
        training.append(history.training)
        return ends

    answer = measure(spec, len(x), fit, lambda: accuracy(model, test))
    answer |= {"initial": weights, "training": [counted(each) for each in training]}
    return answer | lowest_variance(model)


def fed(spec: Spec) -> dict:
    """Run sparkdl with a DataFrame of Parquet files, and measure the memory of its Python workers.

    ``level`` is the anonymous and shared memory of a worker that has imported Keras; ``peak`` is the maximum
    over all workers while they train, in bytes. ``resident`` includes pages of mapped files.
    """
    from sparkdl import SparkModel

    model, weights = initial(spec)
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(spec, folder)
        spark = start_spark(spec)
        frame = spark.read.parquet(folder)
        distributed = SparkModel(model, num_workers=spec.workers, mode=spec.mode, frequency=spec.frequency)
        settings = {"features_col": "x", "label_col": "y", "batch_size": spec.batch_size, "seed": spec.seed}

        def fit(epochs):
            ends, clock = epoch_clock()
            distributed.fit(frame, verbose=0, callbacks=[clock], epochs=epochs, **settings)
            return ends

        level = imported_level(spark)
        with Watch() as watch:
            answer = measure(spec, frame.count(), fit, lambda: 0.0)
    return answer | {"initial": weights, "level": level, "peak": watch.peak, "resident": watch.resident}


def write_parquet(spec: Spec, folder: str) -> None:
    """Write this contestant's rows as Parquet files."""
    import pyarrow as pa
    from pyarrow import parquet

    stretches = generated(spec.rows) if spec.data == GENERATED else [load(spec)[0]]
    for index, (x, y) in enumerate(stretches):
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1]).cast(pa.list_(pa.float32()))
        path = str(Path(folder, f"{index}.parquet"))
        parquet.write_table(pa.table({"x": rows, "y": y}), path, use_dictionary=False, compression="none")


def imported_level(spark) -> int:
    """Return the bytes held by a Python worker that has imported Keras and done nothing else."""

    def level(batches):
        import pyarrow as pa

        from sparkdl.worker import tasks

        tasks.import_keras()
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"held": pa.array([held(Path("/proc/self"))[0]], pa.int64())})

    return spark.range(0, 1, 1, 1).mapInArrow(level, "held long").first()["held"]


class Watch:
    """A watch over the memory of this process's Spark Python workers, or of one process, while it is open.

    Args:
        process: the id of the process to watch instead.

    Attributes:
        peak: the most anonymous and shared memory that one process held, in bytes.
        resident: the most with pages of mapped files.
    """

    def __init__(self, process: int | None = None):
        self.peak, self.resident, self._over = 0, 0, threading.Event()
        self._process = process
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for process in Path("/proc").glob(str(self._process or "[0-9]*")):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    if self._process or _is_worker(process):
                        own, resident = held(process)
                        self.peak = max(self.peak, own)
                        self.resident = max(self.resident, resident)


def _is_worker(process: Path) -> bool:
    """Return True for a Python worker of this process's Spark."""
    ours = os.getsid(int(process.name)) == os.getsid(0)
    return ours and b"pyspark.daemon" in (process / "cmdline").read_bytes()


def held(process: Path) -> tuple[int, int]:
    """Return a process's anonymous and shared memory, and that with pages of mapped files, in bytes."""
    found = dict(re.findall(r"Rss(Anon|Shmem|File):\s+(\d+)", (process / "status").read_text()))
    sizes = {kind: 1024 * int(kib) for kind, kib in found.items()}
    own = sizes.get("Anon", 0) + sizes.get("Shmem", 0)
    return own, own + sizes.get("File", 0)


def counted(training: dict) -> dict:
    """Return the plain numbers of a History's ``training``."""
    keys = ("workers", "rows", "merge", "learning_rate_scale", "exchanges", "bytes_received", "bytes_sent")
    found = {key: training[key] for key in keys if key in training}
    return found | {"epoch_seconds": [float(s) for s in training.get("epoch_seconds", [])]}


def moving(spec: Spec) -> dict:
    """Measure the time to send the model's trainable variables over TCP and receive as many back.

    A step of plain Keras precedes each exchange, as in training: by then the other end sleeps and the caches
    hold other data. One end runs on the worker's core; the other, a separate process, does not.
    """
    rows, _ = load(spec)
    model, _ = initial(spec)
    data = b"".join(variable.numpy().tobytes() for variable in model.trainable_variables)
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        near = socket.create_connection(server.getsockname()) if child else None
        far = None if child else server.accept()[0]
    if far is not None:
        leave_core(spec.pin)
        while received(far, len(data)):
            far.sendall(data)
        os._exit(0)
    os.sched_setaffinity(0, [spec.pin])
    turns = [exchanged(spec, near, data, model, rows) for _ in range(1 + spec.turns)]
    near.close()
    os.waitpid(child, 0)
    return {"turns": turns[1:]}


def exchanged(spec: Spec, connection: socket.socket, data: bytes, model, rows) -> float:
    """Return the median seconds of a round trip of the data, over an epoch of steps."""
    gate(spec)
    seconds = []
    for first in range(0, len(rows[0]), spec.batch_size):
        model.train_on_batch(*(part[first : first + spec.batch_size] for part in rows))
        start = time.perf_counter()
        connection.sendall(data)
        received(connection, len(data))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def received(connection: socket.socket, size: int) -> bytearray:
    """Return ``size`` bytes, or fewer if the connection ends."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest and (count := connection.recv_into(rest)):
        rest = rest[count:]
    return data[: size - len(rest)]


def reference(spec: Spec) -> dict:
    """Run the sequential simulation of the rule, from ``tests/reference.py``."""
    path = harness.REPOSITORY / "tests" / "reference.py"
    module_spec = importlib.util.spec_from_file_location("reference", path)
    simulation = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(simulation)

    (x, y), test = load(spec)
    model, weights = initial(spec)
    settings = {
        "workers": spec.workers,
        "batch_size": spec.batch_size,
        "epochs": spec.epochs,
        "seed": spec.seed,
    }
    if spec.mode != "synchronous":
        how = simulation.asynchronous
        settings.update(frequency=spec.frequency, rule=spec.merge)
    elif spec.frequency == "batch":
        how = simulation.synchronous_batch
    else:
        how = simulation.synchronous
        settings.update(frequency=spec.frequency)
        if spec.merge == "bmuf":
            power = 0.5 if spec.rate != 1 else 1.0  # the default, and the rule by its name
            settings["combine"] = simulation.Nesterov(1.0, 1 - spec.workers**-power)
    trained = how(lambda: make_model(spec), model.get_weights(), x, y, **settings)
    return {"accuracy": accuracy(trained, test), "initial": weights}


# --- processes and cores ------------------------------------------------------------------------


def start_spark(spec: Spec):
    """Return a session with one slot per worker, in this process's own JVM."""
    from pyspark.sql import SparkSession

    if spec.pin >= 0:
        os.environ["PYSPARK_PYTHON"] = pinned_python(spec.pin)
        leave_core(spec.pin)
    builder = SparkSession.builder.master(f"local[{spec.workers}]").appName(spec.title)
    builder = builder.config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def pinned_python(core: int) -> str:
    """Write a launcher of this Python that first pins itself to the core."""
    folder = tempfile.mkdtemp(prefix="sparkdl-benchmark-")
    atexit.register(shutil.rmtree, folder)
    launcher = Path(folder) / "python"
    move = f"import os, sys; os.sched_setaffinity(0, [{core}]); os.execv(sys.executable, "
    move += "[sys.executable, *sys.argv[1:]])"
    launcher.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{move}' \"$@\"\n")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    return str(launcher)


def leave_core(core: int) -> None:
    """Keep this process, and the JVM that it starts, off the core if there is another."""
    others = os.sched_getaffinity(0) - {core}
    if others:
        os.sched_setaffinity(0, others)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Run the contestant that the first argument describes."""
    spec = Spec(**json.loads(sys.argv[1]))
    if spec.name == "plain" and spec.pin >= 0:
        os.sched_setaffinity(0, [spec.pin])
    else:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec.cores])
    contestants = (plain, ceiling, elephas, sparkdl, fed, reference, moving)
    contestant = {each.__name__: each for each in contestants}.get(spec.name)
    if contestant is None:
        import peer_contestants

        contestant = getattr(peer_contestants, spec.name)
    print(json.dumps(contestant(spec)), flush=True)


if __name__ == "__main__":
    main()
