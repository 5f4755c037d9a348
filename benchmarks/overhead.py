"""What one sparkdl worker costs over plain ``model.fit``, on one core each.

Plain Keras runs on one core with one thread. The worker runs on the same core with one thread; the
driver, its endpoint and Spark's JVM run on the other cores, so what is compared is the same core's
work. Worker start and compilation are excluded on both sides by the definition of
``contestants.measure``. All live side by side and take turns, and each ratio is taken within its turn. A
turn of all has to be shorter than a minute, as with the defaults: Spark ends a Python worker that idles
for longer, and the next fit would begin in a fresh process, beside plain Keras in its warm one.

At "batch" there is also the time that a step takes longer than one of plain Keras. It is held against
1 ms and what the same bytes take over TCP alone, there and back, in the same turn.

    python benchmarks/overhead.py --data MNIST_FOLDER [--backend jax]
"""

import argparse
import os
import statistics
from dataclasses import replace

import harness
from harness import Spec, spread, table

TITLE = "Overhead: one worker beside plain Keras"
BARS = {"epoch": 0.9, "batch": 0.6}
ADDED = 1.0  # ms per step, beside the bytes


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_common_options(parser, epochs=1, rounds=9)
    harness.add_warm_option(parser)
    parser.set_defaults(rows=20000, warm_epochs=3)
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
        "turns": options.rounds,
    }
    contestants = harness.chosen([Spec("plain"), Spec("moving"), *ours], options)
    specs = [replace(spec, **settings) for spec in contestants]
    answers = dict(zip(specs, harness.in_turns(specs), strict=True))
    for spec, answer in answers.items():
        print(f"# {spec.title}: {harness.brief(answer)}")

    plain, bytes_alone = (measured(answers, name) for name in ("plain", "moving"))
    rows = [line(spec, answers[spec], plain, bytes_alone) for spec in specs if spec.name != "moving"]
    words = (
        f"{options.rounds} turns, {options.warm_epochs} epochs of "
        f"{options.rows or 60000:,} rows, batch {options.batch_size}, {options.optimizer}; "
        "medians [min..max]. " + harness.machine(harness.pythons(options, specs))
    )
    if bytes_alone:
        alone = spread((1000 * seconds for seconds in bytes_alone), ".2f")
        words += f"\n\nThe bytes of an exchange alone, over TCP: {alone} ms."
    header = ["", "rows/s, warm", "share of plain Keras", "bar", "added per step, ms", "bar", "exchanges"]
    body = table([*header, "bytes received", "bytes sent"], rows)
    title = TITLE if options.backend == "tensorflow" else f"{TITLE}, on {options.backend}"
    harness.report(title, f"{words}\n\n{body}", options.results)


def measured(answers: dict[Spec, dict], name: str) -> list[float]:
    """Return a contestant's figures, one per turn."""
    return next((answer.get("turns", []) for spec, answer in answers.items() if spec.name == name), [])


def line(spec: Spec, answer: dict, plain: list[float], alone: list[float]) -> list[str]:
    """Return a contestant's line of the table; counters are those of its first fit."""
    mine = answer.get("turns", [])
    share = [rate / other for rate, other in zip(mine, plain, strict=False)]
    cells = [spec.title, spread(mine), spread(share, ".3f")]
    bar = BARS.get(spec.frequency)
    cells.append(verdict(f"{bar}", statistics.median(share) >= bar) if bar and share else "–")
    added = []
    if spec.frequency == "batch":
        pairs = zip(mine, plain, strict=False)
        added = [1000 * spec.batch_size * (1 / rate - 1 / other) for rate, other in pairs]
    cells.append(spread(added, ".2f"))
    if added and alone:
        bar = ADDED + 1000 * statistics.median(alone)
        cells.append(verdict(f"{bar:.2f}", statistics.median(added) <= bar))
    else:
        cells.append("–")
    return [*cells, *harness.counters(answer)]


def verdict(bar: str, met: bool) -> str:
    """Return a bar and whether it is met."""
    return f"{bar} {'met' if met else '**missed**'}"


if __name__ == "__main__":
    main()
