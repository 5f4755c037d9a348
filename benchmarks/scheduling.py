"""Compare the mean completion time of a hundred jobs: the scheduler, and first come, first served.

The queues are simulated with the scheduler's own policy, so the table is the same on any machine. The lengths
of jobs are log-normal: a few jobs are far longer than the others, as in the traces of Tiresias (Gu et al.,
NSDI 2019). ``--real`` also runs three fits on two slots and prints their times.

    python benchmarks/scheduling.py --results benchmarks/RESULTS.md
"""

import argparse
import math
import random
import statistics
from dataclasses import replace

import harness
from harness import table, verdict

from sparkdl.scheduling.policy import Policy
from sparkdl.scheduling.simulation import JobTimes, SimulatedJob, simulate

SLOTS, BAR, OVERHEAD = 8, 0.7, 10.0  # OVERHEAD: seconds per start, also after a pause
EPOCHS, SPREAD = 8.0, 1.2  # the median and the sigma of the log-normal number of epochs
SECONDS = 20.0, 90.0  # the shortest and the longest epoch
WORKERS = 1, 1, 1, 2, 2, 4
LOADS = {"0.7": 0.7, "1": 1.0, "1.3": 1.3, "all at once": math.inf}
FIRST_COME = {"time_slice": math.inf, "aging": math.inf}


def hundred_jobs(seed: int, load: float = 1.0) -> list[SimulatedJob]:
    """Return a hundred jobs.

    Args:
        seed: the seed of their lengths, slots and arrivals.
        load: the slot-seconds of work that arrive per second and slot; infinity: all jobs arrive at once.
    """
    draw, arrival, jobs = random.Random(seed), 0.0, []
    mean = EPOCHS * math.exp(SPREAD**2 / 2) * statistics.fmean(SECONDS) * statistics.fmean(WORKERS)
    for number in range(100):
        job = SimulatedJob(
            name=str(number),
            slots=draw.choice(WORKERS),
            epochs=max(1, round(draw.lognormvariate(math.log(EPOCHS), SPREAD))),
            true_seconds=draw.uniform(*SECONDS),
            arrival=arrival,
        )
        jobs.append(job)
        arrival += draw.expovariate(1.0) * mean / (SLOTS * load)
    return jobs


def run(jobs: list[SimulatedJob], **settings: object) -> list[JobTimes]:
    """Return the outcomes of jobs under a policy with these settings."""
    return list(simulate(jobs, Policy(SLOTS, **settings), overhead=OVERHEAD).values())


def mean_completion(outcomes: list[JobTimes]) -> float:
    """Return the mean time from arrival to end, in seconds."""
    return statistics.fmean(found.completion for found in outcomes)


def known(jobs: list[SimulatedJob]) -> list[SimulatedJob]:
    """Return the same jobs, with their true seconds per epoch as the estimate of the policy."""
    return [replace(job, seconds=job.true_seconds) for job in jobs]


def section(queues: int) -> str:
    """Return the tables of the simulation."""
    policies = {
        "first come, first served": lambda jobs: run(jobs, **FIRST_COME, backfill=False),
        "with back-fill, known epochs": lambda jobs: run(known(jobs), **FIRST_COME),
        "the scheduler": lambda jobs: run(jobs),
        "the scheduler, known epochs": lambda jobs: run(known(jobs)),
        "the scheduler, no aging": lambda jobs: run(jobs, aging=math.inf),
    }
    rows = []
    for load_name, load in LOADS.items():
        found = {
            name: [each(hundred_jobs(seed, load)) for seed in range(queues)]
            for name, each in policies.items()
        }
        base = [mean_completion(outcomes) for outcomes in found["first come, first served"]]
        for name, runs in found.items():
            means = [mean_completion(outcomes) for outcomes in runs]
            ratios = [mean / first for mean, first in zip(means, base, strict=True)]
            longest = statistics.median(max(each.longest_wait for each in outcomes) for outcomes in runs)
            pauses = statistics.fmean(len(each.starts) - 1 for outcomes in runs for each in outcomes)
            bar = name == "the scheduler" and load == 1.0
            rows.append(
                [
                    load_name,
                    name,
                    f"{statistics.fmean(means) / 60:,.0f} min",
                    f"{statistics.fmean(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]",
                    verdict(f"≤ {BAR}", statistics.fmean(ratios) <= BAR) if bar else "",
                    f"{longest / 60:,.0f} min",
                    f"{pauses:.1f}",
                ]
            )
    times = "mean completion", "ratio, mean [min..max]", "bar", "longest wait"
    header = ["load", "policy", *times, "pauses per job"]
    text = (
        f"Simulated: {queues} queues of 100 jobs per load on {SLOTS} slots, {OVERHEAD:.0f} s per start, "
        f"also after a pause; a time slice of {Policy.time_slice:.0f} s, aging of {Policy.aging:.0f} s. "
        f"Jobs have a median of {EPOCHS:.0f} epochs (log-normal, sigma {SPREAD}) of {SECONDS[0]:.0f} to "
        f"{SECONDS[1]:.0f} s, 1, 2 or 4 workers, and equal priorities. A load of 1 brings as much work as "
        "the slots can do. The ratio is that of mean completion times, queue by queue; the longest wait is "
        "the median over queues."
    )
    return f"{text}\n\n{table(header, rows)}"


def real() -> str:
    """Run three fits on two slots, the last one urgent; return a table of their times."""
    import time

    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel
    from sparkdl.scheduling import Scheduler

    class Times(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times, self.before = [], []

        def on_train_begin(self, logs: object = None) -> None:
            self.before = [job.epochs_done for job in jobs]

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            self.times.append(time.monotonic() - began)

    draw = np.random.default_rng(0)
    x = draw.normal(size=(20_000, 32)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int32")

    def fit(name: str, workers: int, epochs: int, priority: int = 0) -> None:
        layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile("adam", "binary_crossentropy")
        times[name] = Times()
        made = SparkModel(model, num_workers=workers)
        options = {"epochs": epochs, "seed": 0, "callbacks": [times[name]]}
        submitted[name] = time.monotonic() - began
        jobs.append(scheduler.submit(made, x, y, name=name, priority=priority, **options))

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    times, submitted, jobs, began = {}, {}, [], time.monotonic()
    with Scheduler(2) as scheduler:
        fit("long 1", 1, 12)
        fit("long 2", 1, 12)
        while min(job.epochs_done for job in jobs) < 3:
            time.sleep(0.01)
        done = [job.epochs_done for job in jobs]
        fit("urgent", 2, 2, priority=1)
        print(scheduler.plan())
    rows = [
        [
            name,
            f"{submitted[name]:.1f} s",
            f"{each.times[0]:.1f} s",
            f"{each.times[-1]:.1f} s",
            str(jobs[index].fit.pieces - 1),
        ]
        for index, (name, each) in enumerate(times.items())
    ]
    began_after = [now - then for now, then in zip(times["urgent"].before[:2], done, strict=True)]
    session.stop()
    header = ["job", "submitted", "end of epoch 1", "end", "pauses"]
    return f"The urgent job began after {began_after} more epochs of the others.\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--queues", type=int, default=20, help="simulated queues per load")
    parser.add_argument("--real", action="store_true", help="also run three fits; needs Java")
    parser.add_argument("--results", help="Markdown file to write the simulation into")
    options = parser.parse_args()
    harness.report("Scheduling: a hundred jobs", section(options.queues), options.results)
    if options.real:
        print(f"\n{real()}")


if __name__ == "__main__":
    main()
