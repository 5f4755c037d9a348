"""Compare an ensemble of five models with its members: accuracy on Fashion-MNIST, time of ``transform``.

``Ensemble.fit`` trains five replicas of a CNN on the first training images. Their accuracy on the test images
is compared with that of three ensembles: the mean of their outputs, the majority of their votes, and a mean
whose weights are learned on further training images (``Ensemble.stack``). The best member is selected on the
same test images, so the comparison favours it.

Then the ensemble and each member transform a cached DataFrame, which repeats the test images. Each member
needs its own pass over the rows. Each turn compares the time of the ensemble with the sum of its members'
times.

    python benchmarks/ensembles.py --data FASHION_MNIST_FOLDER --results benchmarks/RESULTS.md
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import harness
from harness import spread, table, verdict
from inference import BATCH, compute, frame_of, timed

MEMBERS = 5
BAR = 1.15
BATCH_SIZE = 64


def build():
    """Return the compiled CNN of the convergence study."""
    import keras
    import problems

    model = problems.cnn()
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def accuracy(model, x, y) -> float:
    """Return the share of images that a model classifies correctly."""
    return float((model.predict(x, batch_size=BATCH, verbose=0).argmax(axis=1) == y).mean())


def compare_accuracy(train, held_out, test, options):
    """Return a table row for each seed, True if each ensemble beat its best member, and the last ensemble."""
    from sparkdl import Ensemble

    lines, won = [], []
    for seed in range(options.seeds):
        ensemble = Ensemble.fit(
            build, *train, num_members=MEMBERS, seed=seed, epochs=options.epochs, batch_size=BATCH_SIZE
        )
        stacked = ensemble.stack(*held_out, epochs=5, batch_size=BATCH_SIZE, seed=seed)
        hard = Ensemble([_scored(member) for member in ensemble.members], voting="hard")
        members = [accuracy(member, *test) for member in ensemble.members]
        soft = accuracy(ensemble.model, *test)
        won.append(soft > max(members))
        others = [accuracy(each.model, *test) for each in (hard, stacked)]
        figures = [f"{each:.2%}" for each in (min(members), max(members), soft, *others)]
        lines.append([str(seed), *figures, verdict("> best", won[-1])])
        print(f"# seed {seed}: {', '.join(figures)}", flush=True)
    return lines, won, ensemble


def _scored(model):
    """Return a copy of a member, compiled as for its training."""
    copy = build()
    copy.set_weights(model.get_weights())
    return copy


def compare_times(ensemble, frame, count: int, rounds: int):
    """Return table rows: the time of all members, that of the ensemble, and its rows per second."""
    from sparkdl.ml import KerasTransformer

    def transformed(model):
        return KerasTransformer(model=model, task="classification", inferenceBatchSize=BATCH).transform(frame)

    contestants = {"ensemble": transformed(ensemble.model)}
    contestants |= {f"member {k}": transformed(member) for k, member in enumerate(ensemble.members)}
    seconds = {name: [] for name in contestants}
    for turn, name in harness.interleave(list(contestants), rounds + 1):
        took = timed(lambda name=name: compute(contestants[name]))
        if turn:  # the first turn warms up
            seconds[name].append(took)
    whole = seconds.pop("ensemble")
    sums = [sum(turn) for turn in zip(*seconds.values(), strict=True)]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(whole, sums, strict=True))
    return [
        [f"the {MEMBERS} members, one after the other", spread(sums, ",.2f"), "1.00", ""],
        [
            "the ensemble",
            spread(whole, ",.2f"),
            f"{ratio:.2f}",
            verdict(f"≤ {BAR}", ratio <= BAR),
        ],
        ["rows/s of the ensemble", spread(count / each for each in whole), "", ""],
    ]


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of Fashion-MNIST's four IDX .gz files")
    parser.add_argument("--rows", type=int, default=20_000, help="number of training images")
    parser.add_argument(
        "--held-out", type=int, default=4_000, help="further ones, on which weights are learned"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--times", type=int, default=10, help="number of times that the test images repeat")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", help="Markdown file to write the section into")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np
    from contestants import flat, read_idx
    from pyspark.sql import SparkSession

    (x, y), test = [
        (flat(images).reshape(-1, 28, 28, 1), labels.astype("int64"))
        for images, labels in (read_idx(Path(options.data), part) for part in ("train", "t10k"))
    ]
    edge, end = options.rows, options.rows + options.held_out
    builder = SparkSession.builder.master(f"local[{os.cpu_count()}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "4g").getOrCreate()
    parts = (x[:edge], y[:edge]), (x[edge:end], y[edge:end]), test
    lines, won, ensemble = compare_accuracy(*parts, options)
    rows = np.tile(test[0].reshape(len(test[0]), -1), (options.times, 1))
    with tempfile.TemporaryDirectory() as folder:
        times = compare_times(ensemble, frame_of(spark, rows, folder), len(rows), options.rounds)
    spark.stop()
    header = ["seed", "worst member", "best member", "ensemble", "hard votes", "stacked", "bar"]
    words = (
        f"Accuracy on {len(test[1]):,} test images, after {options.epochs} epochs on {edge:,} images; "
        f"weights learned on {options.held_out:,} further ones. {sum(won)} of {len(won)} ensembles beat "
        f"their best member. {harness.machine({'sparkdl': sys.executable})}"
    )
    more = f"`transform` of {len(rows):,} rows, batches of {BATCH}; medians of {options.rounds} turns."
    tables = [table(header, lines), more, table(["", "seconds", "ratio", "bar"], times)]
    title = "Ensembles: five models compared with their best member"
    harness.report(title, "\n\n".join([words, *tables]), options.results)


if __name__ == "__main__":
    main()
