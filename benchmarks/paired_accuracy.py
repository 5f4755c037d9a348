"""Test accuracy, seed by seed: sparkdl compared with plain Keras, the reference simulation and Elephas.

The seed determines the initial weights that all contestants start from, which the script checks. Each setting
of sparkdl is compared within its seed with plain ``model.fit`` at the same batch size and epochs, with the
sequential simulation of its rule (``tests/reference.py``), and with Elephas's counterpart. The script prints
the mean of the paired differences in points of accuracy and its 95 % interval by Student's t.

    python benchmarks/paired_accuracy.py --elephas-venv ~/elephas --data MNIST_FOLDER

It takes hours. With ``--journal benchmarks/paired_accuracy.jsonl``, the file of stored answers beside this
script, only missing answers are computed.

With ``--model cnn`` the contestants train a network with BatchNormalization instead, and the script prints
the lowest moving variance of a trained model, which must not be negative:

    python benchmarks/paired_accuracy.py --model cnn --only plain "sparkdl async" --data MNIST_FOLDER

With ``--by-label`` sparkdl gets rows sorted by their label, and plain Keras does not:

    python benchmarks/paired_accuracy.py --by-label --epochs 15 --only plain sparkdl --data MNIST_FOLDER
"""

import argparse
import statistics
from dataclasses import replace

import harness
from compare_elephas import ELEPHAS, OURS, counterpart
from harness import Spec, table

TITLE = "Accuracy: paired seeds"


def simulation(ours: Spec) -> Spec:
    """Return the reference simulation of this setting; hogwild's arithmetic is that of asynchronous."""
    mode = "asynchronous" if ours.mode == "hogwild" else ours.mode
    rule, rate = default(ours)
    return replace(ours, name="reference", mode=mode, merge=rule, rate=rate, by_label=False)


def default(ours: Spec) -> tuple[str, float]:
    """Return sparkdl's rule, and its factor of the learning rate."""
    if ours.merge:
        return ours.merge, 1.0
    if ours.frequency == "batch":
        return "average" if ours.mode == "synchronous" else "sum", 1.0
    return "bmuf" if ours.mode == "synchronous" else "dynsgd", ours.workers**0.5


def contestants(rules: list[str]) -> list[Spec]:
    """Return all contestants; ``rules`` adds asynchronous settings with a named rule."""
    named = [replace(spec, merge=rule) for rule in rules for spec in OURS if spec.mode == "asynchronous"]
    ours = [*OURS, *named]
    return list(dict.fromkeys([Spec("plain"), *ours, *map(simulation, ours), *ELEPHAS]))


def gap(accuracies: dict[str, list[float]], ours: str, other: str) -> str:
    """Return "mean ± half width" of the paired differences, in points."""
    pairs = zip(accuracies.get(ours, []), accuracies.get(other, []), strict=False)
    points = [100 * (a - b) for a, b in pairs]
    if not points:
        return "–"
    mean, half = harness.paired_interval(points)
    return f"{mean:+.2f} ± {half:.2f}"


def section(optimizer: str, specs: list[Spec], options, journal) -> str:
    """Run the missing contestants of an optimizer and return its table."""
    specs = [replace(spec, optimizer=optimizer) for spec in specs]
    answers = {spec.title: [{}] * options.rounds for spec in specs}
    for seed, spec in harness.interleave(specs, options.rounds):
        answers[spec.title][seed] = journal.run(replace(spec, seed=seed), seed)
    check_start(answers, options.rounds)
    check_rules(specs, answers)
    whole = {
        title: [answer["accuracy"] for answer in seeds]
        for title, seeds in answers.items()
        if all("accuracy" in answer for answer in seeds)
    }
    rows = []
    for spec in specs:
        mean = f"{statistics.fmean(whole[spec.title]):.4f}" if spec.title in whole else "failed"
        others = ["–", "–"]
        if spec.name == "sparkdl":
            others = [simulation(spec).title, counterpart(spec).title]
        gaps = [gap(whole, spec.title, other) for other in ["plain", *others]]
        rows.append([spec.title, mean, *(["–"] * 3 if spec.name == "plain" else gaps)])
        lowest = [answer["lowest_variance"] for answer in answers[spec.title] if "lowest_variance" in answer]
        rows[-1] += [f"{min(lowest):.2g}"] if lowest else []
    header = ["", "mean accuracy", "minus plain Keras", "minus its simulation", "minus Elephas"]
    header += ["lowest variance"] if max(map(len, rows)) > len(header) else []
    return f"### {optimizer.upper()}\n\n{table(header, rows)}"


def check_start(answers: dict[str, list[dict]], seeds: int) -> None:
    """Raise an error if contestants did not start from the same weights."""
    for seed in range(seeds):
        starts = {each[seed]["initial"] for each in answers.values() if "initial" in each[seed]}
        if len(starts) > 1:
            raise SystemExit(f"Seed {seed}: contestants began with different weights: {starts}.")


def check_rules(specs: list[Spec], answers: dict[str, list[dict]]) -> None:
    """Raise an error unless the simulation uses the rule that sparkdl reports."""
    for spec in specs:
        for answer in answers[spec.title] if spec.name == "sparkdl" else []:
            training = answer.get("training", [{}])[0]
            used = training.get("merge"), training.get("learning_rate_scale", 1.0)
            if used[0] and used != default(spec):
                raise SystemExit(f"{spec.title} used {used}; the simulation was of {default(spec)}.")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_common_options(parser, epochs=5, rounds=5)
    harness.add_elephas_options(parser)
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--by-label", action="store_true", help="give sparkdl rows sorted by their label")
    parser.add_argument("--rules", nargs="*", default=[], help="asynchronous rules to add by name")
    options = parser.parse_args()
    specs = [
        replace(spec, model=options.model) for spec in harness.chosen(contestants(options.rules), options)
    ]
    specs = [replace(spec, by_label=options.by_label and spec.name == "sparkdl") for spec in specs]
    pythons = harness.pythons(options, specs)
    journal = harness.Journal(options.journal, pythons)
    parts = [section(optimizer, specs, options, journal) for optimizer in options.optimizers]
    words = (
        f"{options.rounds} seeds, {options.epochs} epochs of {options.rows or 60000:,} rows, batch "
        "64, 2 workers. Differences in points, mean ± half of the 95 % interval. " + harness.machine(pythons)
    )
    harness.report(
        TITLE + ", BatchNormalization" * (options.model == "cnn") + ", sorted by label" * options.by_label,
        "\n\n".join([words, *parts]),
        options.results,
    )


if __name__ == "__main__":
    main()
