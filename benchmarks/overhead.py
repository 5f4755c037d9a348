"""What one sparkdl worker costs over plain ``model.fit``, on one core each.

Plain Keras runs on one core with one thread. The worker runs on the same core with one thread; the
driver, its endpoint and Spark's JVM run on the other cores, so what is compared is the same core's
work. Worker start and compilation are excluded on both sides by the definition of
``contestants.measure``. Pairs are interleaved, and each ratio is taken within its round.

    python benchmarks/overhead.py --data MNIST_FOLDER
"""

import argparse
import os
import statistics
from dataclasses import replace

import harness
from harness import Spec, ratios, spread, table

TITLE = "Overhead: one worker beside plain Keras"
WARM = "rows_per_second_warm"
BARS = {"epoch": 0.9, "batch": 0.6}


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_common_options(parser, epochs=1, rounds=5)
    harness.add_warm_option(parser)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    ours = [
        Spec("sparkdl", mode, frequency)
        for frequency in BARS
        for mode in ("synchronous", "asynchronous", "hogwild")
    ]
    settings = {
        "workers": 1,
        "cores": os.cpu_count(),
        "pin": options.core,
        "optimizer": options.optimizer,
        "batch_size": options.batch_size,
        "warm_epochs": options.warm_epochs,
    }
    contestants = harness.chosen([Spec("plain"), *ours], options)
    specs = [replace(spec, **settings) for spec in contestants]
    journal = harness.Journal(options.journal)
    answers = {spec: [] for spec in specs}
    for round_, spec in harness.interleave(specs, options.rounds):
        answers[spec].append(journal.run(replace(spec, seed=round_), round_))

    plain = warm(answers.get(specs[0], []))
    rows = [line(spec, answers[spec], plain) for spec in specs]
    words = (
        f"{options.rounds} interleaved rounds, {options.warm_epochs} epochs of "
        f"{options.rows or 60000:,} rows, batch {options.batch_size}, {options.optimizer}; "
        "medians [min..max]. " + harness.machine(harness.pythons(options, specs))
    )
    header = ["", "rows/s, warm", "share of plain Keras", "bar", "exchanges", "bytes received"]
    harness.report(TITLE, words + "\n\n" + table([*header, "bytes sent"], rows), options.results)


def warm(answers: list[dict]) -> dict[int, float]:
    """Return the warm rate by round; a round that failed is left out."""
    return {round_: answer[WARM] for round_, answer in enumerate(answers) if WARM in answer}


def line(spec: Spec, answers: list[dict], plain: dict[int, float]) -> list[str]:
    """Return a contestant's line of the table; counters are those of its first fit."""
    share = ratios(warm(answers), plain)
    bar = BARS.get(spec.frequency)
    if bar and share:
        bar = f"{bar} {'met' if statistics.median(share) >= bar else '**missed**'}"
    rates = [spread(warm(answers).values()), spread(share, ".3f")]
    return [spec.title, *rates, bar or "–", *harness.counters(answers[0])]


if __name__ == "__main__":
    main()
