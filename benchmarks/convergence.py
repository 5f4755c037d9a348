"""Accuracy at equal epochs: modes, frequencies and rules compared with plain Keras, on 1 to 8 workers.

Every run is a worker group of real Keras replicas with sparkdl's training loop, coordinator and rules, in one
process and in virtual time (``tests/simulator.py``). Workers take batches at their own jittering speeds,
which determine the order of updates, so a run is repeatable. Each is compared, seed by seed, with
``model.fit`` from the same weights, with the same batch size and epochs.

    python benchmarks/convergence.py --data FOLDER --journal benchmarks/convergence.jsonl

runs the cases missing in the journal (hours); several processes may run at once, each on part of it. The
parts are the defaults, the pilot from which they were chosen (of another seed: ``--part pilot --seeds 0``),
DiLoCo (``--part diloco --optimizers adamw``), the joint start (``--part joint --workers 2 4 8 16``), whose
first epochs are those of ``model.fit``, and the joint start on Spark, an executor process for each worker
(``--part spark --workers 2``). Seconds are those of one process that does all workers' work.

``--shortfalls sparkdl/driver/known_shortfalls.json`` runs nothing, and writes from the journal the settings
that the driver warns of.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import harness
import numpy as np
from harness import table

PROBLEMS = "mnist", "fashion", "resnet", "tabular", "characters", "pieces"
TESTS = harness.REPOSITORY / "tests"
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Case:
    """One run: the problem and its training settings.

    Attributes:
        problem: a name of ``problems.PROBLEMS``.
        optimizer: the workers' optimizer.
        mode: "plain" for ``model.fit``, or a mode of ``SparkModel``.
        frequency: "batch", a number of batches, "epoch", or "auto".
        merge: the rule as an expression over ``sparkdl.rules`` and K; "" is the default.
        workers: the number of workers.
        seed: the seed of initial weights, orders and speeds.
        epochs: the number of epochs.
        rate: the factor of the learning rate, as an expression over K; "" is 1.
        rows: the number of training rows, from the first; 0 is all of them.
        spark: whether the workers are executors of Spark, in real time.
    """

    problem: str
    optimizer: str
    mode: str = "plain"
    frequency: str | int = ""
    merge: str = ""
    workers: int = 1
    seed: int = 0
    epochs: int = 15
    rate: str = ""
    rows: int = 0
    spark: bool = False

    @property
    def title(self) -> str:
        """The setting as tables name it."""
        if self.mode == "plain":
            return "plain Keras"
        rate = f", rate x {self.rate}" if self.rate else ""
        where = " on Spark" if self.spark else ""
        return f"{self.mode}/{self.frequency} {self.merge or 'default'}{rate}{where}"


def run(case: Case, folder: str) -> dict:
    """Train; return the score and the loss of each epoch on the test rows, bytes and seconds."""
    import problems

    problem = problems.PROBLEMS[case.problem]
    (x, y), test = problem.load(folder)
    x, y = x[: case.rows or None], y[: case.rows or None]
    steps = case.epochs * -(-len(x) // problem.batch_size)
    scale = evaluated(case.rate, case) if case.rate else 1.0
    model, judge = (problems.make_model(problem, case.optimizer, case.seed, steps, scale) for _ in range(2))
    scores, losses = [], []

    def score(weights):
        judge.set_weights(weights)
        result = judge.evaluate(*test, batch_size=1000, verbose=0, return_dict=True)
        scores.append(round(float(result[problem.score]), 5))
        losses.append(round(float(result["loss"]), 5))

    began = time.perf_counter()
    if case.mode == "plain":
        for _ in range(case.epochs):
            model.fit(x, y, problem.batch_size, verbose=0)
            score(model.get_weights())
        moved = 0
    elif case.spark:
        moved = on_spark(case, model, problem.batch_size, x, y, score)
    else:
        joint = joint_epochs_of(case)
        for _ in range(joint):
            model.fit(x, y, problem.batch_size, verbose=0)
            score(model.get_weights())
        rest = replace(case, epochs=case.epochs - joint)
        moved, failure = group(rest, model, problem.batch_size, x, y, score)
        if failure:
            return {"diverged": failure, "scores": scores, "losses": losses}
    seconds = round(time.perf_counter() - began, 1)
    answer = {"scores": scores, "losses": losses, "bytes": moved, "seconds": seconds}
    if case.frequency == "auto" and not case.spark:  # the bytes are only those of the windows
        batches = -(-len(x) // problem.batch_size)
        local = local_batch_size_of(case)
        windows = -(-len(x) // case.workers // local // 16)
        answer |= {"bytes": 0, "rounds": joint * batches + rest.epochs * windows, "of": case.epochs * batches}
    return answer


def on_spark(case: Case, model, batch_size: int, x, y, score) -> int:
    """Train with ``SparkModel`` on executor processes; return the bytes that they exchanged."""
    import keras
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    spark = SparkSession.builder.master(f"local-cluster[{case.workers},1,2048]").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark_model = SparkModel(
        model, mode=case.mode, frequency=case.frequency, merge=rule_of(case), num_workers=case.workers
    )
    each = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: score(model.get_weights()))
    training = spark_model.fit(
        x, y, batch_size, epochs=case.epochs, callbacks=[each], seed=case.seed, verbose=0
    ).training
    return training["bytes_sent"] + training["bytes_received"]


def joint_epochs_of(case: Case) -> int:
    """Return the number of epochs of the joint start."""
    from sparkdl.api.joint_start import joint_epochs

    return joint_epochs(case.epochs, case.workers) if case.frequency == "auto" else 0


def local_batch_size_of(case: Case) -> int | None:
    """Return the number of rows of a worker's batch after a joint start; None: the problem's batch size."""
    from sparkdl.api.joint_start import window_batch_size

    joined = case.frequency == "auto"
    return window_batch_size(problem_of(case.problem).batch_size, case.workers) if joined else None


def settings_of(case: Case) -> tuple[int | None, object]:
    """Return the window and the rule of a case; after a joint start, those that follow it."""
    if case.frequency == "auto":
        from sparkdl.config import AUTO_MERGE, AUTO_WINDOW

        return AUTO_WINDOW, rule_of(case) or AUTO_MERGE
    return {"batch": 1, "epoch": None}.get(case.frequency, case.frequency), rule_of(case)


def group(case: Case, model, batch_size: int, x, y, score) -> tuple[int, str]:
    """Train with a worker group in virtual time; return the bytes it moved and its error, if any."""
    sys.path.insert(0, str(TESTS))
    train, world = (
        importlib.import_module("worker_threads").train,
        importlib.import_module("simulator").World(),
    )
    from sparkdl.data.batch_plan import even_split
    from sparkdl.errors import DivergedError
    from sparkdl.modeling import keras_variables
    from sparkdl.modeling.keras_variables import Layouts
    from sparkdl.server.local_exchange import LocalExchange
    from sparkdl.transport.messages import REPLY, UPDATE, lengths_of

    moved = [0]

    class Counted(LocalExchange):
        """An exchange that counts the bytes it would send and receive."""

        def begin(self, update):
            moved[0] += UPDATE.size + lengths_of(update).nbytes
            return super().begin(update)

        def finish(self, ticket):
            reply = super().finish(ticket)
            moved[0] += REPLY.size + lengths_of(reply).nbytes
            return reply

    layouts, shown = Layouts.of(model), model

    def seen(snapshot):
        keras_variables.write(keras_variables.trainable(shown), layouts.trainable.unpack(snapshot.parameters))
        keras_variables.write(
            keras_variables.statistics(shown), layouts.statistics.unpack(snapshot.statistics)
        )
        score(shown.get_weights())

    rng = np.random.default_rng(case.seed)
    order = rng.permutation(len(x))
    draws = [np.random.default_rng([case.seed, worker]) for worker in range(case.workers)]
    window, rule = settings_of(case)
    try:
        train(
            model,
            x[order],
            y[order],
            mode=case.mode,
            window=window,
            merge=rule,
            rows=even_split(len(x), case.workers),
            batch_size=batch_size,
            epochs=case.epochs,
            local_batch_size=local_batch_size_of(case),
            world=world,
            paces=[lambda draw=draw: draw.gamma(16) / 16 for draw in draws],
            seed=case.seed,
            exchange=Counted,
            seen=seen,
        )
    except DivergedError as error:
        return moved[0], str(error)
    return moved[0], ""


def evaluated(words: str, case: Case):
    """Return the value of an expression over ``sparkdl.rules`` and K."""
    from sparkdl import rules
    from sparkdl.rules import outer

    return eval(words, vars(rules) | vars(outer) | {"K": case.workers})


def rule_of(case: Case):
    """Return the rule that a case names, None for the default."""
    return evaluated(case.merge, case) if case.merge else None


def told(case: Case) -> str:
    """Return the current rule and scale of a case, which identify answers of older code."""
    from sparkdl.rules import choose

    if case.mode == "plain":
        return ""
    window, merge = settings_of(case)
    rule, scale = choose(merge, mode=case.mode, window=window).bound(case.workers)
    settings = ", ".join(f"{name}={value}" for name, value in vars(rule).items())
    joint = joint_epochs_of(case)
    after = f" after {joint} joint epochs" if joint else ""
    local = local_batch_size_of(case)
    if joint and local != problem_of(case.problem).batch_size:
        after += f", batches of {local} rows"
    return f"{rule.name}({settings}) at {scale:.4g}{after}"


# --- the cases ----------------------------------------------------------------------------------

ROUNDS = [
    ("Average()", ""),
    ("Average()", "K ** 0.5"),
    ("Average()", "K"),
    ("BMUF()", ""),
    ("DiLoCo()", ""),
    ("Sum()", ""),
    ("Adasum()", ""),
    ("AEASGD()", ""),
    ("FedOpt()", ""),
]
ALONE = [
    ("Sum()", ""),
    ("DynSGD()", ""),
    ("DynSGD()", "K ** 0.5"),
    ("DynSGD()", "K"),
    ("Average()", "K ** 0.5"),
    ("ADAG()", ""),
    ("AEASGD()", ""),
    ("AEASGD()", "K ** 0.5"),
]
DEFAULTS = [
    (mode, frequency, "", "")
    for mode in ("synchronous", "asynchronous")
    for frequency in ("batch", 16, "epoch")
]
PARTS = {
    "defaults": DEFAULTS,
    "pilot": [
        *[("synchronous", frequency, *rule) for frequency in (16, "epoch") for rule in ROUNDS],
        *[("asynchronous", frequency, *rule) for frequency in ("batch", 16, "epoch") for rule in ALONE],
    ],
    "diloco": [
        ("synchronous", "batch", "", ""),
        ("synchronous", 50, "DiLoCo()", ""),
        ("synchronous", 50, "DiLoCo(1.0, 0.5)", ""),
    ],
    "joint": [("synchronous", "auto", "", "")],
    "spark": [("synchronous", "auto", "", "")],
}


TITLES = {
    "defaults": "Convergence: the defaults",
    "pilot": "Convergence: the pilot",
    "diloco": "Convergence: DiLoCo with 50 local steps",
    "joint": "Convergence: a joint start",
    "spark": "Convergence: a joint start on Spark",
}
PAGES = {
    "defaults": "Scores of the defaults",
    "pilot": "Scores in the pilot",
    "diloco": "Scores and costs of DiLoCo",
    "joint": "Scores of a joint start",
    "spark": "Scores of a joint start on Spark",
}


def epochs_of(options, problem: str) -> int:
    """Return the number of epochs for a problem in a part of the study.

    DiLoCo has few rounds per epoch, and the transformer is far from converged after 15 epochs.
    """
    longer = options.part == "diloco" and problem == "characters"
    return options.epochs or (30 if longer else 15)


def cases_of(options, problem: str, optimizer: str) -> list[Case]:
    """Return the cases of a part of the study: every setting for each number of workers and seed."""
    shape = {"epochs": epochs_of(options, problem), "rows": options.rows}
    cases = [Case(problem, optimizer, seed=seed, **shape) for seed in options.seeds]
    for workers in options.workers:
        for setting in PARTS[options.part]:
            mode, frequency, merge, rate = setting
            one = Case(problem, optimizer, mode, frequency, merge, workers, rate=rate, **shape)
            one = replace(one, spark=options.part == "spark")
            if not options.only or any(word in one.title for word in options.only):
                cases += [replace(one, seed=seed) for seed in options.seeds]
    return cases


# --- running ------------------------------------------------------------------------------------


class Journal:
    """The answers so far, one JSON line each; several processes may append to it."""

    def __init__(self, path: str):
        self.path = Path(path)

    def answers(self) -> dict[Case, dict]:
        """Return the answers whose rules are still the current ones."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        records = [json.loads(line) for line in lines]
        found = {Case(**record["case"]): record for record in records}
        return {case: record["answer"] for case, record in found.items() if record["rule"] == told(case)}

    def add(self, case: Case, answer: dict) -> None:
        """Store an answer with the commit that gave it."""
        git = ["git", "-C", str(harness.REPOSITORY), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        with self.path.open("a") as lines:
            lines.write(
                json.dumps({"case": asdict(case), "rule": told(case), "answer": answer, "commit": commit})
                + "\n"
            )


# --- tables and pictures ------------------------------------------------------------------------


def report(cases: list[Case], answers: dict[Case, dict]) -> str:
    """Return a table of the last scores, their differences from plain Keras, and the cost."""
    rows = []
    for setting in dict.fromkeys(replace(case, seed=0) for case in cases):
        seeds = [case for case in cases if replace(case, seed=0) == setting and case in answers]
        whole = [answers[case] for case in seeds if "diverged" not in answers[case]]
        if seeds:
            gaps = gaps_of(setting, sorted(case.seed for case in seeds), answers)
            scores = [mean_of(answer[kind][-1] for answer in whole) for kind in ("scores", "losses")]
            cost = [middle_of(answer[kind] for answer in whole) for kind in ("bytes", "seconds")]
            cost[0] = "–" if setting.frequency == "auto" else cost[0]
            judged = (
                joint_verdict(setting, gaps, answers[seeds[0]])
                or verdict(setting, gaps)
                or economy(setting, len(seeds), answers)
            )
            rows.append([setting.title, setting.workers, len(seeds), *scores, interval(gaps), judged, *cost])
    header = ["", "K", "seeds", "score", "loss", "points vs. plain Keras", "bar", "bytes moved", "seconds"]
    return table(header, rows)


def mean_of(values: Iterable[float]) -> str:
    """Return a mean, or a dash if there are no values."""
    values = list(values)
    return f"{statistics.fmean(values):.4f}" if values else "–"


def middle_of(values: Iterable[float]) -> str:
    """Return a median, or a dash if there are no values."""
    values = list(values)
    return f"{statistics.median(values):,.0f}" if values else "–"


def gaps_of(setting: Case, seeds: list[int], answers: dict[Case, dict]) -> list[float]:
    """Return each seed's last score minus that of plain Keras, in points; nan for a diverged run."""
    plain = replace(setting, mode="plain", frequency="", merge="", rate="", workers=1, spark=False)
    pairs = [(replace(setting, seed=seed), replace(plain, seed=seed)) for seed in seeds]
    return [
        100 * (score_of(answers[ours]) - score_of(answers[theirs]))
        for ours, theirs in pairs
        if ours in answers and theirs in answers
    ]


def score_of(answer: dict) -> float:
    """Return the last score, nan for a diverged run."""
    return float("nan") if "diverged" in answer else answer["scores"][-1]


def interval(points: list[float]) -> str:
    """Return "mean ± half width" of paired differences, or the number of diverged runs."""
    if diverged := int(np.isnan(points).sum()):
        return f"{diverged} of {len(points)} diverged"
    if len(points) < 2:
        return f"{points[0]:+.2f} (one seed)" if points else "–"
    return "{:+.2f} ± {:.2f}".format(*harness.paired_interval(points))


def verdict(setting: Case, gaps: list[float]) -> str:
    """Return the bar of a default with five seeds, and True if it is met.

    In rounds of single batches the bar is plain Keras's score within the noise of the seeds, and at most 0.3
    points less. In rounds of 16 batches it is 0.3 points less; elsewhere 0.5 with up to 4 workers and 1 with
    8. A higher score always meets it.
    """
    judged = setting.mode != "plain" and setting.frequency != "auto" and not (setting.merge or setting.rate)
    if not judged or len(gaps) < LEAST_SEEDS:
        return ""
    mean, half = harness.paired_interval(gaps)
    rounds = setting.mode == "synchronous" and setting.frequency != "epoch"
    bar = 0.3 if rounds else 0.5 if setting.workers <= 4 else 1.0
    single = rounds and setting.frequency == "batch"
    met = mean >= -bar and (not single or mean + half >= 0)
    return f"{'noise' if single else bar}: {'met' if met else 'MISSED'}"


def bar_of_joint(setting: Case) -> float:
    """Return the points by which a fit with a joint start may score below plain Keras."""
    return {2: 0.3, 4: 0.3, 8: 0.7}.get(setting.workers, 1.5)


def joint_verdict(setting: Case, gaps: list[float], answer: dict) -> str:
    """Return the bars of a joint start, score and exchanges, each with True if it is met."""
    if setting.frequency != "auto" or setting.spark:
        return ""
    points, share = bar_of_joint(setting), 8 if setting.workers <= 4 else 5
    fewer = answer["of"] / answer["rounds"]
    met = statistics.fmean(gaps) >= -points and fewer >= share
    return f"{points}, exchanges / {share} (/ {fewer:.1f}): {'met' if met else 'MISSED'}"


def economy(setting: Case, seeds: int, answers: dict[Case, dict]) -> str:
    """Return DiLoCo's loss and bytes relative to those of synchronous/batch, and True if its bar is met."""
    if not setting.merge.startswith("DiLoCo") or seeds < LEAST_SEEDS:
        return ""
    joint = replace(setting, frequency="batch", merge="")
    ours, theirs = (
        [answer for case, answer in answers.items() if replace(case, seed=one.seed) == one]
        for one in (setting, joint)
    )
    if not theirs or any("diverged" in answer for answer in ours + theirs):
        return ""
    loss, joint_loss = (statistics.fmean(a["losses"][-1] for a in part) for part in (ours, theirs))
    share = theirs[0]["bytes"] / ours[0]["bytes"]
    met = loss <= 1.02 * joint_loss and share >= 40
    return f"loss x {loss / joint_loss:.3f}, bytes / {share:.0f}: {'met' if met else 'MISSED'}"


def shortfalls(answers: dict[Case, dict], epochs: int = 15) -> list[tuple]:
    """Return the combinations that fell short, each with its worst problem, in the order of ``Shortfall``.

    A default falls short if its five seeds miss the bar. A named rule falls short if the single seed of the
    pilot is at least one point below plain Keras. A joint start falls short if the mean of its seeds
    misses its bar by a tenth of a point. All fall short if a run diverged.
    """
    found: dict[tuple, tuple] = {}
    settings = {replace(case, seed=0) for case in answers if case.mode != "plain" and not case.rate}
    for one in sorted(settings, key=repr):
        if (
            one.epochs != epochs
            or one.rows
            or one.spark
            or (one.mode, one.frequency) == ("synchronous", "batch")
        ):
            continue
        seeds = (0,) if one.merge else range(1, LEAST_SEEDS + 1)  # of a joint start three
        gaps = gaps_of(one, list(seeds), answers)
        lost = np.isnan(gaps).any()
        short = (
            one.frequency == "auto"
            and bool(gaps)
            and round(statistics.fmean(gaps) + bar_of_joint(one), 1) < 0
        )
        if lost or short or "MISSED" in verdict(one, gaps) or (one.merge and gaps and gaps[0] <= -1):
            kind = one.frequency if isinstance(one.frequency, str) else "n"
            rule = rule_of(one).name if one.merge else ""
            key = one.mode, kind, rule, one.optimizer != "sgd", one.workers
            points = float("inf") if lost else -statistics.fmean(gaps)
            found[key] = max(found.get(key, (0.0, "")), (points, one.problem))
    return [
        (*key, round(points, 1), problem, next_that_met(key, found, settings, epochs))
        for key, (points, problem) in sorted(found.items())
    ]


def next_that_met(key: tuple, found: dict[tuple, tuple], settings: set[Case], epochs: int) -> int | None:
    """Return the next larger number of workers of a combination; None if it fell short too, or if none is."""
    mode, kind, rule, adaptive, workers = key
    larger = {
        one.workers
        for one in settings
        if (one.mode, one.frequency if isinstance(one.frequency, str) else "n") == (mode, kind)
        and (rule_of(one).name if one.merge else "") == rule
        and (one.optimizer != "sgd") == adaptive
        and one.epochs == epochs
        and not one.rows
        and one.workers > workers
    }
    after = min(larger, default=None)
    return None if (*key[:4], after) in found else after


def data_file(answers: dict[Case, dict]) -> str:
    """Return the text of ``known_shortfalls.json``: one record per line, null for a divergence."""
    from sparkdl.driver.known_shortfalls import Shortfall

    records = [dict(zip(Shortfall._fields, line, strict=True)) for line in shortfalls(answers)]
    for record in records:
        record["points"] = None if record["points"] == float("inf") else record["points"]
        if record["below"] is None:
            del record["below"]
    return "[\n" + ",\n".join(f"  {json.dumps(record)}" for record in records) + "\n]\n"


def listed(answers: dict[Case, dict]) -> str:
    """Return the combinations that fell short as a table, with one line for all numbers of workers."""
    lines: dict[tuple, list[str]] = {}
    for mode, kind, rule, adaptive, workers, points, problem, _ in shortfalls(answers):
        setting = f"{mode}/{kind}", rule or "default", "Adam" if adaptive else "SGD"
        lost = "diverged" if points == float("inf") else f"−{points}"
        lines.setdefault(setting, []).append(f"K = {workers}: {lost} ({problem})")
    rows = [[*setting, "; ".join(found)] for setting, found in lines.items()]
    bars = (
        "The table lists each default whose mean over five seeds misses its bar: 0.3 points for "
        "synchronous/16, and otherwise 0.5 points with up to 4 workers and 1 point with 8. Synchronous/batch "
        "is not in the table: its shortfalls are within the noise of the seeds. The table also lists each "
        "named rule, with its default settings, that scored at least one point below plain Keras with the "
        "single seed of the pilot. Each entry names the problem with the largest shortfall. The driver's "
        "warnings apply the rows for Adam to all optimizers except SGD, and the rows for n = 16 to every "
        "number of batches. A joint start (auto) is listed if the mean of its seeds misses its bar by "
        "a tenth of a point: 0.3 points with up to 4 workers, 0.7 with 8 and 1.5 with 16."
    )
    return f"{bars}\n\n{table(['', 'merge', 'optimizer', 'points vs. plain Keras'], rows)}"


def summary(options, answers: dict[Case, dict]) -> str:
    """Return a part's differences from plain Keras, in points: a line per setting, a column per problem."""
    pairs = [(name, which) for name in options.problems for which in options.optimizers]
    pairs = [(name, which) for name, which in pairs if which in problem_of(name).rates]
    rows = []
    for setting, workers in itertools.product(PARTS[options.part], sorted(options.workers)):
        mode, frequency, merge, rate = setting
        one = Case("", "", mode, frequency, merge, workers, rate=rate, rows=options.rows)
        one = replace(one, spark=options.part == "spark")
        ours = [
            replace(one, problem=name, optimizer=which, epochs=epochs_of(options, name))
            for name, which in pairs
        ]
        gaps = [gaps_of(case, options.seeds, answers) for case in ours]
        if any(gaps):
            title = f"{mode}/{frequency}" if options.part == "defaults" else one.title
            rows.append([title, workers, *map(interval, gaps)])
    return table(["", "K", *(f"{name}, {which}" for name, which in pairs)], rows)


def draw(options, answers: dict[Case, dict]) -> None:
    """Plot the defaults' differences from plain Keras by number of workers, one picture per optimizer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    for optimizer in options.optimizers:
        names = [name for name in options.problems if optimizer in problem_of(name).rates]
        figure, panels = pyplot.subplots(
            1, len(names), figsize=(3.2 * len(names), 3.4), layout="constrained", squeeze=False
        )
        labels = {}
        for panel, name in zip(panels[0], names, strict=True):
            for place, (mode, frequency, *_) in enumerate(DEFAULTS):
                one = Case(
                    name, optimizer, mode, frequency, epochs=epochs_of(options, name), rows=options.rows
                )
                gaps = {k: gaps_of(replace(one, workers=k), options.seeds, answers) for k in options.workers}
                points = [(k, *harness.paired_interval(found)) for k, found in gaps.items() if found]
                if points:
                    k, means, halves = np.array(points).T
                    labels[f"{mode}/{frequency}"] = panel.errorbar(
                        k * 1.02 ** (place - 2.5),
                        means,
                        halves,
                        ms=3,
                        capsize=2,
                        lw=1,
                        color=f"C{place % 3}",
                        fmt="o-" if mode == "synchronous" else "o--",
                    )
            panel.axhline(0, color="black", lw=0.8)
            panel.set(title=name, xlabel="workers", xscale="log", xticks=sorted(options.workers))
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.minorticks_off()
        panels[0][0].set_ylabel("points vs. plain Keras")
        figure.suptitle(f"The defaults at equal epochs, {optimizer}")
        figure.legend(labels.values(), labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(Path(options.page).with_name(f"convergence-{optimizer}.png"), dpi=120)


def problem_of(name: str):
    """Return a problem by its name."""
    return importlib.import_module("problems").PROBLEMS[name]


def main() -> None:
    """Run the missing cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with mnist/ and fashion-mnist/")
    parser.add_argument("--journal", required=True)
    parser.add_argument("--part", choices=PARTS, default="defaults")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
    parser.add_argument("--epochs", type=int, help="default: 15, or 30 for DiLoCo on characters")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--only", nargs="*", default=[], help="run only settings whose title has one of these words"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument(
        "--rows", type=int, default=0, help="number of training rows, from the first; 0 is all"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this many minutes"
    )
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--page", help="page of docs/ to write the summary and the pictures for")
    parser.add_argument("--shortfalls", metavar="FILE", help="write the settings that the driver warns about")
    options = parser.parse_args()
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    journal, began, parts = Journal(options.journal), time.monotonic(), []
    if options.shortfalls:
        Path(options.shortfalls).write_text(data_file(journal.answers()), encoding="utf-8")
        return
    for name, optimizer in itertools.product(options.problems, options.optimizers):
        cases = cases_of(options, name, optimizer) if optimizer in problem_of(name).rates else []
        for case in cases:
            if case in journal.answers() or time.monotonic() - began > 60 * options.minutes:
                continue
            answer = run(case, options.data)
            journal.add(case, answer)
            last, seconds = answer["scores"][-1:] or "–", answer.get("seconds")
            print(f"# {case.title} K={case.workers} seed {case.seed}: {last}, {seconds} s", flush=True)
        if cases:
            parts.append(
                f"### {name}, {optimizer}, {cases[0].epochs} epochs\n\n{report(cases, journal.answers())}"
            )
    words = (
        "Worker groups of Keras replicas in one process and in simulated time, with the training loop, "
        "coordinator and rules of sparkdl. A score is an accuracy, or R² (tabular); a point is a hundredth. "
        "Mean ± "
        f"half of the 95 % interval over paired seeds. {harness.machine({'sparkdl': sys.executable})}"
    )
    harness.report(TITLES[options.part], "\n\n".join([words, *parts]), options.results)
    if options.page:
        whole = options.part == "diloco"  # the DiLoCo part is about losses and bytes
        body = "\n\n".join(parts) if whole else summary(options, journal.answers())
        harness.write_section(options.page, PAGES[options.part], body)
    if options.page and options.part == "defaults":
        harness.write_section(options.page, "Combinations that fell short", listed(journal.answers()))
        draw(options, journal.answers())


if __name__ == "__main__":
    main()
