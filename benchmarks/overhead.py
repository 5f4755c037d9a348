"""Overhead of one sparkdl worker over plain ``model.fit``, on one core each.

Plain Keras runs on one core with one thread. The worker runs on the same core with one thread; the driver,
its endpoint and Spark's JVM run on the other cores, so the same core's work is compared. Worker start and
compilation are excluded on both sides by the definition of ``contestants.measure``. The contestants of one
frequency live side by side and take turns, and each ratio is computed within its turn. A turn must be shorter
than a minute, as with the defaults: Spark ends a Python worker that idles for longer, and the next fit would
begin in a fresh process, while plain Keras has a warm one. On a virtual machine the host may take a
processor away for a while. A process that waits for another's answer is hit twice, so only half of the turns
count: those in which the host took the least processor time.

At "batch" the table also has the extra time of a step over one of plain Keras. Its bar is 1 ms plus the time
of the same bytes over TCP, there and back, between the steps of plain Keras.

    python benchmarks/overhead.py --data MNIST_FOLDER [--backend jax]
"""

import argparse
import os
import statistics
from dataclasses import replace

import harness
from harness import Spec, spread, table

TITLE = "Overhead: one worker compared with plain Keras"
BARS = {"epoch": 0.9, "batch": 0.6}
ADDED = 1.0  # ms per step, in addition to the bytes


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_common_options(parser, epochs=1, rounds=16)
    harness.add_warm_option(parser)
    parser.set_defaults(rows=20000, warm_epochs=3)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    settings = {
        "workers": 1,
        "cores": os.cpu_count(),
        "pin": options.core,
        "optimizer": options.optimizer,
        "batch_size": options.batch_size,
        "warm_epochs": options.warm_epochs,
        "turns": options.rounds,
    }
    rows, words = [], []
    for frequency in BARS:
        group = harness.chosen(contestants(frequency), options)
        specs = [replace(spec, **settings) for spec in group]
        answers = dict(zip(specs, harness.in_turns(specs), strict=True))
        for spec, answer in answers.items():
            print(f"# {spec.title}: {harness.brief(answer)}")
        answers = calmer_half(answers)
        stolen = max(share for answer in answers.values() for share in answer["stolen"])
        words.append(
            f'"{frequency}": in the turns that count, the host took at most {stolen:.0%} of the processor '
            "time."
        )
        plain, moving = (measured(answers, name) for name in ("plain", "moving"))
        rows += [line(spec, answers[spec], plain, moving) for spec in specs if spec.name != "moving"]
        if moving:
            alone = spread((1000 * seconds for seconds in moving), ".2f")
            words.append(
                f"Sending the bytes of an exchange over TCP, between steps of plain Keras, takes {alone} ms."
            )
    about = (
        f"{options.warm_epochs} epochs of {options.rows or 60000:,} rows, batch {options.batch_size}, "
        f"{options.optimizer}; medians [min..max] over half of {options.rounds} turns: those in which the "
        "host of the virtual machine took the least processor time. "
        f"{harness.machine(harness.pythons(options, []))}"
    )
    header = ["", "rows/s, warm", "share of plain Keras", "bar", "added per step, ms", "bar", "exchanges"]
    body = table([*header, "bytes received", "bytes sent"], rows)
    title = TITLE if options.backend == "tensorflow" else f"{TITLE}, on {options.backend}"
    harness.report(title, "\n\n".join([about, *words, body]), options.results)


def contestants(frequency: str) -> list[Spec]:
    """Return the contestants of a frequency, which take turns."""
    ours = [Spec("sparkdl", mode, frequency) for mode in ("synchronous", "asynchronous", "hogwild")]
    moving = [Spec("moving")] if frequency == "batch" else []
    return [Spec("plain"), *moving, *ours]


def calmer_half(answers: dict[Spec, dict]) -> dict[Spec, dict]:
    """Return the answers with half of the turns: those in which the host took the least time."""
    worst = [max(shares) for shares in zip(*(answer["stolen"] for answer in answers.values()), strict=True)]
    kept = sorted(range(len(worst)), key=worst.__getitem__)[: (len(worst) + 1) // 2]
    return {
        spec: answer | {key: [answer[key][k] for k in kept] for key in ("turns", "stolen") if key in answer}
        for spec, answer in answers.items()
    }


def measured(answers: dict[Spec, dict], name: str) -> list[float]:
    """Return a contestant's figures, one per turn."""
    return next((answer.get("turns", []) for spec, answer in answers.items() if spec.name == name), [])


def line(spec: Spec, answer: dict, plain: list[float], moving: list[float]) -> list[str]:
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
    if added and moving:
        bar = ADDED + 1000 * statistics.median(moving)
        cells.append(verdict(f"{bar:.2f}", statistics.median(added) <= bar))
    else:
        cells.append("–")
    return [*cells, *harness.counters(answer)]


def verdict(bar: str, met: bool) -> str:
    """Return a bar, and True if it is met."""
    return f"{bar} {'met' if met else '**missed**'}"


if __name__ == "__main__":
    main()
