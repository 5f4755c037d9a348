"""Measure ``tune.search``: asynchronous halving, two slots instead of one, and MLflow's study on Spark.

Each trial trains a multilayer perceptron on Fashion-MNIST with one worker.

    python benchmarks/tuning.py --data DATA_FOLDER --results benchmarks/RESULTS.md
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import harness
import keras
import mlflow
import optuna
from contestants import read_idx
from harness import spread, table, verdict
from pyspark.sql import SparkSession

from sparkdl import tune

ROWS, HELD = 12_000, 2_000  # training and validation rows
TRIALS, EPOCHS, SEEDS = 27, 9, 3  # of the comparison with random search
EQUAL, SHORT, TURNS = 16, 20, 3  # equal trials, their epochs, and turns of the other comparisons
SHARE, POINTS = 1 / 3, 0.3  # of the epochs of random search; points of accuracy that may be lost
SLOTS, START, RIVAL = 0.55, 0.5, 0.7  # ratio of wall times; seconds before a trial's first epoch
SPACE = {"units": (16, 256, "log"), "rate": (1e-3, 1.0, "log"), "drop": (0.0, 0.6)}


def build(units, rate, drop):
    """Return a compiled perceptron."""
    hidden = [keras.layers.Dense(units, "relu"), keras.layers.Dropout(drop)]
    layers = [keras.Input((28, 28, 1)), keras.layers.Flatten(), *hidden, keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(rate, 0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def searched(data, held, **options):
    """Return the result of a search and its seconds."""
    began = time.monotonic()
    options = {"metric": "val_accuracy", "batch_size": 64, "verbose": 0, **options}
    result = tune.search(build, data, options.pop("space", SPACE), validation_data=held, **options)
    return result, time.monotonic() - began


def halving(data, held):
    """Return a table that compares asynchronous halving with random search, and the verdicts."""
    rows, epochs, lost = [], [], []
    for seed in range(SEEDS):
        found = {}
        for pruner in ("none", "asha"):
            result, seconds = searched(
                data, held, num_trials=TRIALS, epochs=EPOCHS, sampler="random", pruner=pruner, seed=seed
            )
            found[pruner] = result.trials["epochs"].sum(), result.best_value
            rows.append([seed, pruner, found[pruner][0], f"{found[pruner][1]:.4f}", f"{seconds:.0f}"])
            print(f"# seed {seed}, {pruner}: {found[pruner]}, {seconds:.0f} s", flush=True)
        epochs.append(found["asha"][0] / found["none"][0])
        lost.append(100 * (found["none"][1] - found["asha"][1]))
    share, points = statistics.fmean(epochs), statistics.fmean(lost)
    verdicts = [
        verdict(f"{share:.2f} of the epochs, ≤ {SHARE:.2f}", share <= SHARE),
        verdict(f"{points:+.2f} points lost, ≤ {POINTS}", points <= POINTS),
    ]
    return table(["seed", "pruner", "epochs", "best accuracy", "s"], rows), verdicts


def objective(trial, data, held):
    """Train and score one model in a task of MLflow's study."""
    keras.utils.set_random_seed(0)
    model = build(64, 0.05, 0.2)
    x, y = data
    history = model.fit(x, y, 64, SHORT, 0, validation_data=held)
    return max(history.history["val_accuracy"])


def of_mlflow(data, held, uri):
    """Return the seconds that MLflow's study on Spark takes for the equal trials."""
    from mlflow.optuna.storage import MlflowStorage
    from mlflow.pyspark.optuna.study import MlflowSparkStudy

    name = f"equal-{time.monotonic_ns()}"
    mlflow.set_tracking_uri(uri)
    experiment = mlflow.create_experiment(name)
    storage = MlflowStorage(experiment_id=experiment)
    study = MlflowSparkStudy(study_name=name, storage=storage, mlflow_tracking_uri=uri, direction="maximize")
    began = time.monotonic()
    study.optimize(functools.partial(objective, data=data, held=held), n_trials=EQUAL, n_jobs=2)
    return time.monotonic() - began


def alone(data, held):
    """Train one of the equal trials with plain Keras when a line has been read; print the seconds.

    ``together`` runs it in processes of their own, with one thread each, as trials have.
    """
    model = build(64, 0.05, 0.2)
    model.fit(*data, 64, 2, 0, validation_data=held)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    model.fit(*data, 64, SHORT, 0, validation_data=held)
    print(time.monotonic() - began, flush=True)


def together(number, source):
    """Return the seconds in which processes of plain Keras, side by side, each train one of the trials."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes |= {"stderr": subprocess.DEVNULL}
    command = [sys.executable, __file__, "--data", source, "--part", "alone"]
    processes = [subprocess.Popen(command, env=os.environ | threads, **pipes) for _ in range(number)]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return max(float(process.communicate()[0]) for process in processes)


def equal(data, held, source):
    """Return a table of equal trials on one slot, on two slots and in MLflow's study, and the verdicts."""
    space = {"units": [64], "rate": [0.05], "drop": [0.2]}
    options = {"space": space, "num_trials": EQUAL, "epochs": SHORT, "pruner": "none", "sampler": "random"}
    seconds = {"one slot": [], "two slots": [], "MLflow on two slots": []}
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        of_mlflow(data, held, uri)  # warm-up: starts the processes
        searched(data, held, **options)
        for turn in range(TURNS):
            for name, run in (
                ("one slot", lambda: searched(data, held, parallelism=1, **options)[1]),
                ("two slots", lambda: searched(data, held, parallelism=2, **options)[1]),
                ("MLflow on two slots", lambda: of_mlflow(data, held, uri)),
            ):
                seconds[name].append(run())
                print(f"# turn {turn}, {name}: {seconds[name][-1]:.1f} s", flush=True)
    starts = starts_of(data, held, options)
    cores = [together(2, source) / (2 * together(1, source)) for _ in range(TURNS)]
    halves = [two / one for one, two in zip(seconds["one slot"], seconds["two slots"], strict=True)]
    rival = [two / its for two, its in zip(seconds["two slots"], seconds["MLflow on two slots"], strict=True)]
    verdicts = [
        verdict(
            f"two slots / one slot {spread(halves, '.2f')}, ≤ {SLOTS}", statistics.median(halves) <= SLOTS
        ),
        f"two fits of plain Keras side by side / one after the other {spread(cores, '.2f')}",
        verdict(f"two slots / MLflow {spread(rival, '.2f')}, ≤ {RIVAL}", statistics.median(rival) <= RIVAL),
        verdict(f"start of a trial {spread(starts, '.2f')} s, ≤ {START}", statistics.median(starts) <= START),
    ]
    return table(
        ["16 equal trials", "s"], [[name, spread(all_, ".1f")] for name, all_ in seconds.items()]
    ), verdicts


def starts_of(data, held, options):
    """Return the overhead of a trial beyond its epochs, in seconds, once per turn.

    Searches of one epoch and of two epochs alternate. The overhead is twice the time of a trial of one epoch
    minus the time of a trial of two epochs. The first two trials of each search are left out.
    """
    rounds = []
    for _ in range(TURNS):
        seconds = []
        for epochs in (1, 2):
            result, _ = searched(
                data, held, **options | {"num_trials": 5, "epochs": epochs, "parallelism": 1}
            )
            seconds.append(statistics.median(result.trials["seconds"][2:]))
        rounds.append(2 * seconds[0] - seconds[1])
    return rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of Fashion-MNIST's four IDX .gz files")
    parser.add_argument("--part", choices=("halving", "equal", "alone"), help="only one of the comparisons")
    parser.add_argument("--results", help="Markdown file to write the section into")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    x, y = read_idx(Path(options.data), "train")
    x = x[..., None].astype("float32") / 255
    data, held = (x[:ROWS], y[:ROWS]), (x[ROWS : ROWS + HELD], y[ROWS : ROWS + HELD])
    if options.part == "alone":
        alone(data, held)
        return
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder.config("spark.ui.showConsoleProgress", "false").getOrCreate().sparkContext.setLogLevel("ERROR")
    parts = {"halving": halving, "equal": functools.partial(equal, source=options.data)}
    machine = harness.machine({"sparkdl": sys.executable})
    texts = [
        f"{TRIALS} trials of up to {EPOCHS} epochs, and {EQUAL} equal ones of {SHORT} epochs in {TURNS} "
        f"turns; {ROWS:,} rows of Fashion-MNIST. {machine}"
    ]
    for name, part in parts.items():
        if options.part in (None, name):
            shown, verdicts = part(data, held)
            texts += [shown, "\n".join(f"- {each}" for each in verdicts)]
    harness.report("Search for hyper-parameters", "\n\n".join(texts), options.results)


if __name__ == "__main__":
    main()
