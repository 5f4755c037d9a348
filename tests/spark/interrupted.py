"""A script that makes one call after the other, each interrupted, and reports all that each leaves behind.

``test_interrupts.py`` starts it as a script or in a notebook kernel, with a folder for the cases. The test
presses Ctrl-C as soon as the file ``CASE.now`` exists.
"""

import json
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

import keras
import numpy as np
from leaks import on_the_driver
from pyspark.sql import SparkSession, functions

import sparkdl
from sparkdl import SparkModel
from sparkdl.ml import KerasTransformer

ROWS, BATCH = 203, 16
STEPS = -(-ROWS // BATCH)
random = np.random.default_rng(7)
x = random.normal(size=(ROWS, 6)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
LONG = 60  # seconds that an interrupted call would take
MODES = {  # a moment may end with the name of one
    "asynchronous": {"mode": "asynchronous", "merge": "sum"},
    "in rounds of 3": {"frequency": 3, "merge": "average"},
}
RATE = 2.0**-6


def model_of(*, built=True):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers] if built else layers)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def counting_model():
    """Return a model whose weight counts the steps, each of them ``RATE``, whatever their order."""
    layers = [keras.Input((6,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(RATE), "mae")
    return model


def session_of():
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()


class At(keras.callbacks.Callback):
    """A callback that marks a moment of a fit and then keeps the driver busy."""

    def __init__(self, hook, mark, *, epoch=1, busy=None):
        super().__init__()
        self.hook, self.mark, self.epoch, self.now = hook, mark, epoch, 0
        self.busy = busy or (lambda: time.sleep(0.1))

    def _reached(self, hook):
        if hook == self.hook and self.now >= self.epoch:
            self.hook = None
            self.mark()
            self.busy()

    def on_train_begin(self, logs=None):
        self._reached("on_train_begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch
        self._reached("on_epoch_begin")

    def on_epoch_end(self, epoch, logs=None):
        self._reached("on_epoch_end")

    def on_test_begin(self, logs=None):
        self._reached("on_test_begin")


class InBatch(At):
    """A callback that marks a moment in the middle of an epoch, through a hook called for every batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            self._reached("on_train_batch_end")


class Ended(keras.callbacks.Callback):
    """A callback that counts the epochs that have ended."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


class Cases:
    """The calls to interrupt, by name, and the checks that they leave nothing behind."""

    def __init__(self, folder):
        self.folder, self.session = Path(folder), session_of()
        self.context = self.session.sparkContext
        handler = signal.getsignal(signal.SIGINT)
        self.handler = handler if callable(handler) else signal.default_int_handler
        self.ended = Ended()
        self.fit(model_of(), epochs=1)
        self.shares = {}
        for mode in MODES:
            self.fit(model := counting_model(), mode=mode, epochs=1)
            self.shares[mode] = counted(model) / STEPS
        self.before = on_the_driver(self.session)

    def fit(self, model, *, mode="", epochs=100_000, callbacks=(), data=None, verbose=0, **settings):
        spark_model = SparkModel(model, num_workers=2, **MODES.get(mode, {}))
        default = (np.ones_like(x), np.full_like(y, 1e9)) if mode else (x, y)
        spark_model.fit(
            *(data or default),
            batch_size=BATCH,
            epochs=epochs,
            shuffle=False,
            verbose=verbose,
            callbacks=[self.ended, *callbacks],
            **settings,
        )

    def once_a_job_runs(self, mark):
        tracker = self.context.statusTracker()

        def look():
            while not tracker.getActiveJobsIds():
                time.sleep(0.005)
            mark()

        threading.Thread(target=look, name="look", daemon=True).start()

    def slow_rows(self, case):
        mark = str(self.folder / f"{case}.now")

        def slow(row):
            Path(mark).touch()
            time.sleep(1)
            return row

        return slow

    def slow_frame(self, slow):
        frame = self.session.range(ROWS).selectExpr("array(double(id)) as features")
        return frame.withColumn("features", functions.udf(slow, "array<double>")("features"))

    def slow_job(self):
        self.context.parallelize(range(2), 2).foreach(lambda _: time.sleep(LONG))

    def make(self, case, moment, model, mode):
        """Return the call to interrupt for a case."""
        now = str(self.folder / f"{case}.now")

        def mark():
            open(now, "w").close()

        def fit(*arguments, kind=At, **options):
            validation = {"validation_data": (x, y)} if "validation" in moment else {}
            return lambda: self.fit(
                model, mode=mode, callbacks=[kind(*arguments, mark, **options)], **validation
            )

        def looked():
            self.once_a_job_runs(mark)
            self.fit(model)

        def with_a_bar():
            self.fit(model, callbacks=[InBatch("on_train_batch_end", mark)], verbose=1)

        def ended():
            self.fit(model, epochs=2, callbacks=[At("on_epoch_end", mark)])

        def with_checkpoints():
            def slow(file):
                mark()
                time.sleep(1)

            with mock.patch("os.fsync", slow):
                self.fit(model, checkpoint=str(self.folder / f"{case}.checkpoints"))

        def at_random():
            mark()
            self.fit(model, mode=mode)

        def waits(worker):
            open(now, "w").close()
            time.sleep(LONG if worker.rank else 0)
            return worker.all_reduce(worker.rank)

        bare = self.context.parallelize(list(zip(x, y, strict=True)), 2)
        slow, unbuilt = self.slow_rows(case), model_of(built=False)
        calls = {
            "before the job": fit("on_train_begin", epoch=0),
            "while workers start": looked,
            "in the feed": lambda: self.fit(model, data=(bare.map(slow),)),
            "in an epoch": fit("on_train_batch_end", kind=InBatch),
            "at an epoch's end": fit("on_epoch_end"),
            "in validation": fit("on_test_begin"),
            "in a callback": fit("on_epoch_begin", busy=lambda: time.sleep(LONG)),
            "in a job of a callback": fit("on_epoch_begin", busy=self.slow_job),
            "while the run finishes": ended,
            "while a checkpoint is written": with_checkpoints,
            "in evaluate": lambda: SparkModel(model).evaluate(bare.map(slow)),
            "in predict": lambda: SparkModel(unbuilt).predict(bare.map(lambda row: slow(row)[0])),
            "in transform": lambda: KerasTransformer(model=unbuilt).transform(self.slow_frame(slow)),
            "in run": lambda: sparkdl.run(waits, num_workers=2),
            "at random": at_random,
            "while a bar is drawn": with_a_bar,
        }
        return calls[moment]

    def begin(self, case, moment):
        """Make the call of a case; it will be interrupted."""
        moment, _, self.mode = moment.partition(", ")
        self.model, self.ended.epochs = counting_model() if self.mode else model_of(), 0
        call = self.make(case, moment, self.model, self.mode)
        try:
            call()
        finally:
            self.over(case)

    def run(self, case, moment):
        """Make the call of a case and report on it."""
        signal.signal(signal.SIGINT, self.handler)
        raised = "nothing"
        try:
            self.begin(case, moment)
        except BaseException as error:  # noqa: BLE001 - every exception is reported
            raised = type(error).__name__
            traceback.print_exc()
        sys.stdout.write(f"== {case}\n")
        sys.stdout.flush()
        self.report(case, raised=raised, came=self.came)

    def over(self, case):
        """Ignore further interrupts and tell the test to send no more."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.came = time.time()
        (self.folder / f"{case}.over").touch()

    def report(self, case, **report):
        """Write a report of everything that a call left behind, after checking that the next fit works."""
        wrong = self.miscounted(self.model) if self.mode else self.wrong(self.model)
        steps = int(self.model.optimizer.iterations)
        lacking = self.ended.epochs * STEPS - steps - bool(self.mode)  # a fraction of a step may be missing
        report |= {"left": self.left(), "wrong": wrong, "lacking": max(0, lacking)}
        self.fit(model_of(), epochs=1)
        part = self.folder / f"{case}.part"
        part.write_text(json.dumps(report))
        part.rename(self.folder / f"{case}.json")

    def left(self):
        """Return the resources that were not there before and are still there after 3 seconds."""
        deadline = time.monotonic() + 3
        while True:
            now = on_the_driver(self.session)
            new = {name: map(str, set(now[name]) - set(self.before[name])) for name in now}
            left = {name: [value for value in new[name] if "IPython" not in value] for name in new}
            left = {name: sorted(values) for name, values in left.items() if values}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def wrong(self, model):
        """Return the distance to a model that took as many steps, relative to the length of its training."""
        reference = model_of()
        start = reference.get_weights()
        steps = int(model.optimizer.iterations)
        for step in range(steps):
            rows = slice(step % STEPS * BATCH, step % STEPS * BATCH + BATCH)
            reference.train_on_batch(x[rows], y[rows])
        pairs = list(zip(model.get_weights(), reference.get_weights(), start, strict=True))
        moved = max(np.abs(r - s).max() for _, r, s in pairs)
        return float(max(np.abs(w - r).max() for w, r, _ in pairs) / (moved or 1))

    def miscounted(self, model):
        """Return the number of steps by which a counting model differs from its number of iterations."""
        difference = counted(model) / self.shares[self.mode] - int(model.optimizer.iterations)
        return max(0.0, abs(difference) - 1) + counted(model) % 1


def counted(model):
    """Return the number of steps that a counting model has taken, also by several workers in parallel."""
    return float(model.get_weights()[0][0, 0]) / RATE


if __name__ == "__main__":
    cases = Cases(sys.argv[1])
    for case, moment in enumerate(sys.argv[2:]):
        cases.run(case, moment)
