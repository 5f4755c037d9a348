"""Rows per second of sparkdl and of tf.distribute, torch DDP, TorchDistributor and Keras on JAX.

All contestants train the same model on the same MNIST rows with SGD and a global batch of 64, on the same
cores; those with several workers have one per core, with 64 / K rows of a batch each. sparkdl with a window
of n batches, per epoch or asynchronous takes 64 rows per worker. Each runs in its own process, in interleaved
rounds. One that takes more than LONGEST seconds has failed.

*Warm* is the rate of the epochs after the first one of a fit. *First epoch* is the time from the call of
``fit``, or from the start of the processes, to the end of the first epoch.

The ceiling is two ``fit`` processes of plain Keras that exchange nothing, each pinned to a core, with half
of the rows and of each batch.

    python benchmarks/peers.py --backends-python .venv-backends/bin/python --tf-keras FOLDER --data MNIST

Keras 2 (``tf_keras``), which ``MultiWorkerMirroredStrategy`` needs, is installed in FOLDER if it is missing.
"""

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import harness
from harness import Spec, ratios, spread, table, verdict

TITLE = "Speed: what users would pick instead"
FIRST, WARM = "seconds_first", "rows_per_second_warm"
PLAIN, CEILING = Spec("plain"), Spec("ceiling", batch_size=32)
JAX, BATCH = Spec("plain", backend="jax"), Spec("sparkdl", "synchronous", "batch")
BATCH_ON_JAX = replace(BATCH, backend="jax")
OURS = [BATCH, Spec("sparkdl", "synchronous", 16), Spec("sparkdl", "synchronous", "epoch")]
OURS += [Spec("sparkdl", "asynchronous", "batch"), BATCH_ON_JAX, replace(OURS[1], backend="jax")]
PEERS = [
    Spec("mirrored"),
    Spec("mirrored_loop"),
    Spec("torch_ddp", backend="torch"),
    Spec("torch_distributor", backend="torch"),
    Spec("keras_ddp", backend="torch"),
    Spec("data_parallel", backend="jax"),
]
ONE_PROCESS = [PLAIN, CEILING, JAX, Spec("plain", backend="torch")]
# sparkdl's share of the ceiling, and on JAX of one process with all cores
SHARES = {"mlp": 0.9, "strided": 0.95}
SHARE_ON_JAX, SLOWEST_TURN = 0.6, 0.5
LONGEST = 180  # seconds until a contestant counts as hung
NAMES = {
    "plain": "plain Keras",
    "ceiling": "the ceiling",
    "mirrored": "MultiWorkerMirroredStrategy, `fit` of Keras 2",
    "mirrored_loop": "MultiWorkerMirroredStrategy, own loop",
    "torch_ddp": "torch DDP",
    "torch_distributor": "TorchDistributor",
    "keras_ddp": "Keras on torch, DDP",
    "data_parallel": "Keras's DataParallel, two devices",
}

Answers = dict[Spec, dict[int, dict]]  # by round


def title_of(spec: Spec) -> str:
    """Return the name of a contestant in the table."""
    name = spec.title.replace(spec.name, NAMES.get(spec.name, spec.name))
    return name + f" on {spec.backend}" * (spec.backend != "tensorflow" and spec.name in ("plain", "sparkdl"))


def of(answers: Answers, spec: Spec, column: str) -> dict[int, float]:
    """Return a figure of a contestant by round, without failed rounds."""
    return {each: answer[column] for each, answer in answers.get(spec, {}).items() if column in answer}


def rates(answers: Answers) -> str:
    """Return the table of all contestants, the quickest first."""

    def median(spec):
        return statistics.median(of(answers, spec, WARM).values() or [0.0])

    rows = []
    for spec in sorted(answers, key=median, reverse=True):
        warm = of(answers, spec, WARM)
        failed = len(answers[spec]) - len(warm)
        rows.append(
            [
                title_of(spec) + f" ({failed} of {len(answers[spec])} failed)" * bool(failed),
                spread(warm.values()),
                spread(ratios(warm, of(answers, PLAIN, WARM)), ".2f"),
                spread(of(answers, spec, FIRST).values(), ".1f"),
            ]
        )
    return table(["", "rows/s, warm", "/ plain Keras", "first epoch, s"], rows)


def verdicts(answers: Answers, model: str) -> list[str]:
    """Return the bars of a model."""
    bars = [(BATCH, CEILING, SHARES[model]), (BATCH_ON_JAX, JAX, SHARE_ON_JAX)]
    bars += [(BATCH, peer, 1) for peer in PEERS]
    found = []
    for ours, theirs, bar in bars:
        if share := ratios(of(answers, ours, WARM), of(answers, theirs, WARM)):
            text = f"{title_of(ours)} / {title_of(theirs)} {spread(share, '.2f')}, ≥ {bar}"
            found.append(verdict(text, statistics.median(share) >= bar))
    if turns := list(of(answers, BATCH, WARM).values()):
        slowest = min(turns) / statistics.median(turns)
        text = f"{title_of(BATCH)}, slowest turn / median {slowest:.2f}, ≥ {SLOWEST_TURN}"
        found.append(verdict(text, slowest >= SLOWEST_TURN))
    return found


def tf_keras_in(folder: str) -> None:
    """Install Keras 2 for the installed TensorFlow in a folder, and let contestants find it."""
    if not (Path(folder) / "tf_keras").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "tf_keras"]
        subprocess.run(pip, check=True)
    os.environ["PYTHONPATH"] = str(Path(folder).resolve())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_common_options(parser, epochs=1, rounds=7)
    harness.add_warm_option(parser)
    parser.add_argument("--journal", help="file that keeps each answer")
    parser.add_argument("--models", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--backends-python", required=True, help="a Python with Keras, torch and JAX")
    parser.add_argument("--tf-keras", required=True, help="folder of Keras 2; made if it is missing")
    options = parser.parse_args()
    tf_keras_in(options.tf_keras)
    pythons = dict.fromkeys(("jax", "torch"), str(Path(options.backends_python).absolute()))
    journal = harness.Journal(options.journal, pythons)
    parts = [
        f"{options.rounds} interleaved rounds, {options.rows or 60000:,} rows, {options.warm_epochs} warm "
        "epochs, a global batch of 64, SGD, 2 workers on 2 cores; medians [min..max]. "
        + harness.machine({"TensorFlow": sys.executable, "torch and JAX": pythons["jax"]})
    ]
    settings = {"data": options.data, "rows": options.rows, "epochs": options.epochs}
    settings |= {"warm_epochs": options.warm_epochs}
    specs = [*ONE_PROCESS, *PEERS, *OURS]
    specs = [each for each in specs if not options.only or any(one in each.title for one in options.only)]
    for model in options.models:
        answers: Answers = {spec: {} for spec in specs}
        for round_, spec in harness.interleave(specs, options.rounds):
            whole = replace(spec, model=model, seed=round_, **settings)
            answers[spec][round_] = journal.run(whole, round_, timeout=LONGEST)
        parts += [f"### {model}", rates(answers)]
        parts += ["\n".join(f"- {each}" for each in verdicts(answers, model))]
    harness.report(TITLE, "\n\n".join(parts), options.results)


if __name__ == "__main__":
    main()
