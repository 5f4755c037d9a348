"""Rows per second and accuracy: sparkdl compared with Elephas 7.3.0, plain Keras and the ceiling.

All contestants train the same MLP on the same MNIST rows with the same batch size, optimizer, epochs and
initial weights on the same cores. Each runs in its own process, in interleaved rounds. Medians are over
rounds; a ratio is computed within each round before its median.

*First fit* is the first ``fit`` of a session: worker start, imports and compilation included (the session and
the RDD are made before). *Warm* excludes them: it is the time of ``--warm-epochs`` more epochs in a second
fit of the session. Plain Keras and sparkdl report the ends of epochs to a callback on the driver, so the time
is measured from the end of the first epoch to the end of the last. Elephas does not; for it, the time is that
of a fit of 1 + ``--warm-epochs`` epochs less that of a fit of 1 epoch. One-time work of a fit cancels out:
starting workers and servers, moving rows, building and compiling the model. That is fair to Elephas: its
asynchronous workers compile once per fit, which is not counted; its synchronous trainer rebuilds and retraces
its model in every epoch, which is counted, as its users pay for it. Elephas also gets an RDD with one
partition per worker, which avoids the shuffle that ``num_workers=`` would add to each fit. Its rows are
shuffled by the seed, because sparkdl deals its rows at random as well. The halves of MNIST's own order
differ, so replicas trained on them average to a different model.

The ceiling is the sum of the rates of independent ``model.fit`` processes, one pinned per core with one
thread, each with its share of the rows. They start together and exchange nothing. They stand for workers, so
their first fit includes what a worker's start does: importing Keras and making the model. The bar is the
lower of a multiple of Elephas's rows/s (4 in synchronous mode and at "batch" or every n batches; 2 at "epoch"
elsewhere) and a share of the ceiling (0.85 at "epoch", else 0.6).

    python benchmarks/compare_elephas.py --elephas-venv ~/elephas --data MNIST_FOLDER
"""

import argparse
import statistics
from dataclasses import replace

import harness
from harness import Spec, ratios, spread, table

TITLE = "Speed: sparkdl, Elephas 7.3.0, plain Keras"
FIRST, WARM = "rows_per_second_first", "rows_per_second_warm"

ELEPHAS = [
    Spec("elephas", "synchronous", "epoch", shuffled=True),
    Spec("elephas", "asynchronous", "epoch", shuffled=True),
    Spec("elephas", "hogwild", "epoch", shuffled=True),
    Spec("elephas", "asynchronous", "batch", shuffled=True),
    Spec("elephas", "hogwild", "batch", shuffled=True),
]
OURS = [
    Spec("sparkdl", mode, frequency)
    for mode in ("synchronous", "asynchronous", "hogwild")
    for frequency in ("batch", "epoch")
]
OURS.insert(1, Spec("sparkdl", "synchronous", 16))
CONTESTANTS = [Spec("plain"), Spec("ceiling"), *ELEPHAS, *OURS]

# One worker alone, not raced: it sends the same bytes although there is no other worker.
ALONE = [Spec("sparkdl", "synchronous", frequency, workers=1) for frequency in ("batch", "epoch")]

Answers = dict[str, list[dict]]  # by title, one per round


def counterpart(ours: Spec) -> Spec:
    """Return Elephas's counterpart of this setting; it has one synchronous trainer."""
    frequency = "epoch" if ours.mode == "synchronous" else ours.frequency
    return Spec("elephas", ours.mode, frequency)


def bar(ours: Spec, answers: Answers, column: str) -> float | None:
    """Return the bar for this setting in rows/s, if the measures exist."""
    theirs = values(answers, counterpart(ours).title, column).values()
    ceiling = values(answers, "ceiling", column).values()
    if not theirs or not ceiling:
        return None
    at_epoch = ours.frequency == "epoch"
    multiple = 2 if at_epoch and ours.mode != "synchronous" else 4
    share = 0.85 if at_epoch else 0.6
    return min(multiple * statistics.median(theirs), share * statistics.median(ceiling))


def values(answers: Answers, title: str, column: str) -> dict[int, float]:
    """Return one figure of a contestant by round, without failed rounds."""
    rounds = enumerate(answers.get(title, []))
    return {round_: answer[column] for round_, answer in rounds if column in answer}


def speeds(answers: Answers) -> str:
    """Return the table of rows/s and accuracy of all contestants."""
    rows = []
    for title, rounds in answers.items():
        failed = sum("error" in answer for answer in rounds)
        warm = values(answers, title, WARM)
        row = [title + f" ({failed} failed)" * bool(failed)]
        row += [spread(values(answers, title, FIRST).values()), spread(warm.values())]
        row += [spread(ratios(warm, values(answers, "plain", WARM)), ".2f")]
        rows.append([*row, spread(values(answers, title, "accuracy").values(), ".4f")])
    header = ["", "rows/s, first fit", "rows/s, warm", "warm / plain Keras", "test accuracy"]
    return table(header, rows)


def bars(answers: Answers, ours: list[Spec]) -> str:
    """Return the table that compares settings of sparkdl with Elephas and with the bar."""
    rows = []
    for spec in ours:
        row = [spec.title, counterpart(spec).title]
        for column in (FIRST, WARM):
            mine = values(answers, spec.title, column)
            theirs = values(answers, counterpart(spec).title, column)
            wanted = bar(spec, answers, column)
            row += [spread(ratios(mine, theirs), ".1f"), verdict(mine, wanted)]
        rows.append([*row, spread(points_ahead(answers, spec), "+.2f")])
    header = ["sparkdl", "Elephas", "first fit, ratio", "bar, rows/s", "warm, ratio", "bar, rows/s"]
    return table([*header, "accuracy, difference in points"], rows)


def verdict(mine: dict[int, float], wanted: float | None) -> str:
    """Return the bar in rows/s, and True if the median is above it."""
    if not mine or wanted is None:
        return "–"
    met = statistics.median(mine.values()) >= wanted
    return f"{wanted:,.0f} {'met' if met else '**missed**'}"


def points_ahead(answers: Answers, ours: Spec) -> list[float]:
    """Return sparkdl's lead over Elephas in points of accuracy, round by round."""
    mine = values(answers, ours.title, "accuracy")
    theirs = values(answers, counterpart(ours).title, "accuracy")
    return [100 * (mine[round_] - theirs[round_]) for round_ in mine if round_ in theirs]


def traffic(records: dict[Spec, dict]) -> str:
    """Return a table of the endpoint's counters, from the first fit of each contestant."""
    rows = []
    for spec, answer in records.items():
        rows.append([spec.title, str(spec.workers), *harness.counters(answer)])
    return table(["", "workers", "exchanges", "bytes received", "bytes sent"], rows)


def section(optimizer: str, specs: list[Spec], options, journal) -> str:
    """Run the missing contestants of an optimizer and return its tables."""
    specs = [replace(spec, optimizer=optimizer) for spec in specs]
    answers: Answers = {spec.title: [] for spec in specs}
    records = {}
    for round_, spec in harness.interleave(specs, options.rounds):
        answer = journal.run(replace(spec, seed=round_), round_)
        answers[spec.title].append(answer)
        if spec.name == "sparkdl":
            records.setdefault(spec, answer)
    ours = [spec for spec in specs if spec.name == "sparkdl"]
    for spec in ALONE if ours else []:
        alone = replace(ours[0], workers=1, frequency=spec.frequency, mode=spec.mode, warm_epochs=0)
        records[alone] = journal.run(alone, 0)
    parts = [f"### {optimizer.upper()}", speeds(answers)]
    if ours:
        parts += [bars(answers, ours), "The endpoint's counters:", traffic(records)]
    return "\n\n".join(parts)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_common_options(parser, epochs=10, rounds=5)
    harness.add_warm_option(parser)
    harness.add_elephas_options(parser)
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
    parser.add_argument("--workers", type=int, default=2, help="workers, and cores for everybody")
    options = parser.parse_args()
    settings = {
        "workers": options.workers,
        "cores": options.workers,
        "warm_epochs": options.warm_epochs,
    }
    specs = [replace(spec, **settings) for spec in harness.chosen(CONTESTANTS, options)]
    pythons = harness.pythons(options, specs)
    journal = harness.Journal(options.journal, pythons)
    parts = [section(optimizer, specs, options, journal) for optimizer in options.optimizers]
    words = (
        f"{options.rounds} interleaved rounds, {options.epochs} epochs of "
        f"{options.rows or 60000:,} rows (warm: {options.warm_epochs}), batch 64, "
        f"{options.workers} workers on as many cores; medians [min..max]. " + harness.machine(pythons)
    )
    harness.report(TITLE, "\n\n".join([words, *parts]), options.results)


if __name__ == "__main__":
    main()
