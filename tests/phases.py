"""Kills or stops a process in a given phase of a fit or a prediction.

Run as a program, this is a driver. Its arguments are a folder, a phase, a fault and a setting. It trains,
from the newest checkpoint if there is one, or predicts, and writes the result to ``FOLDER/result.json``.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
from pyspark import TaskContext

from sparkdl import CheckpointConfig, FaultTolerance, SparkModel

# The worker's function that begins each phase, and which of its calls to take.
PHASES = {
    "preflight": ("sparkdl/spark/preflight.py", "check", 1),
    "feed": ("sparkdl/data/spill.py", "add", 1),
    "trace": ("src/trainers/trainer.py", "compute_loss", 1),
    "exchange": ("sparkdl/transport/client.py", "send", 3),
    "epoch's end": ("sparkdl/worker/loop.py", "_finish", 1),
    "evaluation": ("sparkdl/worker/loop.py", "_evaluate", 1),
    "checkpoint": ("sparkdl/worker/loop.py", "_standing", 1),
    "predict": ("sparkdl/worker/inference.py", "_predict", 1),
}
SETTINGS = {
    "synchronous": ("synchronous", "batch", None, {"fault_tolerance": FaultTolerance(recovery_every=3)}),
    "synchronous-2": ("synchronous", 2, "average", {"fault_tolerance": FaultTolerance(recovery_every=2)}),
    "asynchronous-2": ("asynchronous", 2, "sum", {}),
    "hogwild": ("hogwild", "batch", "sum", {}),
    "executors": (
        "synchronous",
        "batch",
        None,
        {"placement": "executors", "fault_tolerance": FaultTolerance(recovery_every=3)},
    ),
}
# Settings of single tests, which the product of all phases and faults leaves out.
OTHERS = {
    "executors-2": (
        "synchronous",
        2,
        "bmuf",
        {"placement": "executors", "fault_tolerance": FaultTolerance(recovery_every=2)},
    ),
    "elastic": ("synchronous", 2, "aeasgd", {"placement": "executors"}),
    "int8": ("synchronous", 2, "average", {"compression": "int8"}),
}
WORKERS, ROWS, BATCH, EPOCHS = 2, 96, 8, 3
FAULTS = "kill", "stop 5", "stop 30", "stop 90"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def strike(fault, processes):
    """Kill processes, or stop them for some seconds."""
    if fault == "kill":
        for process in processes:
            os.kill(process, signal.SIGKILL)
        return
    all_ = " ".join(map(str, processes))
    script = f"kill -STOP {all_}; sleep {fault.split()[1]}; kill -CONT {all_}"
    subprocess.Popen(["sh", "-c", script], start_new_session=True)
    time.sleep(1)  # until the signal has arrived


class Act:
    """A fault that hits a worker, its executor or the driver once, in a phase of worker 0.

    Args:
        folder: gets a file ``done`` when the fault happens.
        phase: one of PHASES.
        victim: "worker", "executor" or "driver".
        fault: one of FAULTS.
    """

    def __init__(self, folder, phase, victim, fault):
        self.folder, self.victim, self.fault = str(folder), victim, fault
        self.file, self.name, self.number = PHASES[phase]
        self.seen = 0

    def __call__(self, rows):
        """Watch this process if it has worker 0's rows; return the rows."""
        sys.setprofile(None)
        if TaskContext.get().partitionId() == 0 and not Path(self.folder, "done").exists():
            sys.setprofile(self._see)
        return rows

    def _see(self, frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name != self.name or not code.co_filename.endswith("/" + self.file):
            return
        self.seen += 1
        if self.seen < self.number:
            return
        sys.setprofile(None)
        Path(self.folder, "done").touch()
        if self.victim == "driver":
            time.sleep(1)
        elif self.victim == "worker":
            strike(self.fault, [os.getpid()])
        else:
            strike(self.fault, [parent_of(os.getppid()), os.getpid()])


def loss(y_true, y_pred):
    """Return a loss whose gradient is minus the sum of the inputs, whatever the weights are.

    Integers and powers of two add up exactly in any order, where means of 7 rows would be rounded.
    """
    return -keras.ops.sum(y_pred)


def model_of():
    kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), kernel])
    model.compile(keras.optimizers.SGD(2.0**-6), loss)
    return model


def call(context, setting, folder, act=None, *, phase):
    """Train and return the weight, or predict and return the predictions."""
    x = np.arange(1, ROWS + 1, dtype=np.float32)[:, None]
    rows = context.parallelize(list(zip(x, x, strict=True)), WORKERS)
    rows = rows if act is None else rows.mapPartitions(act)
    mode, frequency, merge, more = (SETTINGS | OTHERS)[setting]
    model = model_of()
    spark_model = SparkModel(
        model,
        mode=mode,
        frequency=frequency,
        merge=merge,
        num_workers=WORKERS,
        custom_objects={"loss": loss},
        **more,
    )
    if phase == "predict":
        model.set_weights([np.full((1, 1), 0.5, np.float32)])
        return np.concatenate(spark_model.predict(rows.map(lambda row: row[0])).collect()).tolist()
    in_epochs = phase == "checkpoint" and act is not None
    checkpoint = CheckpointConfig(str(folder), every=5 if in_epochs else "epoch")
    spark_model.fit(
        rows,
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=3,
        verbose=0,
        preserve_partitions=True,
        validation_split=0.25,
        checkpoint=checkpoint,
        resume=True,
    )
    return model.get_weights()[0].ravel().tolist()


def main():
    from pyspark.sql import SparkSession

    folder, phase, fault, setting = sys.argv[1:]
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    act = Act(folder, phase, "driver", fault)
    gateway = spark.sparkContext._gateway.proc.pid

    def look():
        while not Path(folder, "done").exists():
            time.sleep(0.01)
        strike(fault, [os.getpid(), gateway])

    if not Path(folder, "done").exists():
        threading.Thread(target=look, daemon=True).start()
    if phase == "checkpoint":
        act.file, act.name, act.number = "sparkdl/driver/checkpoints.py", "_write", 2
        act, watching = None, act
        threading.setprofile(watching._see)
    result = call(spark.sparkContext, setting, Path(folder, "checkpoints"), act, phase=phase)
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
