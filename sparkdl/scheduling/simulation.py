"""Simulation of a queue with the policy's own code, for the plan of a scheduler, tests and the benchmark."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkdl.scheduling.policy import JobSpec, Policy

FORECAST_EPOCHS = 10_000  # about a second for a hundred jobs


@dataclass(frozen=True, kw_only=True)
class SimulatedJob(JobSpec):
    """A job to simulate.

    Attributes:
        true_seconds: the seconds of an epoch; the policy knows only ``seconds``, until an epoch has ended.
        arrival: the time of its arrival, in seconds.
    """

    true_seconds: float
    arrival: float = 0.0


@dataclass
class JobTimes:
    """The times of a simulated job, in seconds.

    Attributes:
        arrival: its arrival.
        starts: its start, and its starts after pauses.
        stops: its pauses, and the end of its last epoch.
        longest_wait: its longest wait for slots.
    """

    arrival: float
    starts: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    longest_wait: float = 0.0

    @property
    def completion(self) -> float:
        """The seconds from its arrival to its end."""
        return self.stops[-1] - self.arrival


class Simulation:
    """A queue in simulated time.

    Args:
        policy: the policy, whose queue may hold jobs already.
        overhead: the seconds between the start of a job, also after a pause, and its first epoch.
        now: the time at which the simulation begins.
    """

    def __init__(self, policy: Policy, *, overhead: float = 0.0, now: float = 0.0) -> None:
        self.policy, self.overhead, self.now = policy, overhead, now
        self.outcomes: dict[str, JobTimes] = {}
        self._seconds: dict[str, float] = {}  # of an epoch, by the name of the job
        self._number = itertools.count()
        # Time, tie-breaker, name of the job, and the job itself if it arrives; None if its epoch ends.
        self._events: list[tuple[float, int, str, SimulatedJob | None]] = []

    def add(self, job: SimulatedJob) -> None:
        """Add a job that arrives later."""
        self.outcomes[job.name] = JobTimes(job.arrival)
        self._seconds[job.name] = job.true_seconds
        self._push(job.arrival, job.name, job)

    def adopt(self, name: str, seconds: float) -> None:
        """Add a job of the policy's queue, with the seconds of its epochs."""
        entry = self.policy.entries[name]
        self.outcomes[name] = JobTimes(entry.arrival)
        self._seconds[name] = seconds
        if entry.running:
            self.outcomes[name].starts.append(entry.since)
            self._push(max(self.now, entry.began + seconds), name)

    def run(self, most: float = math.inf) -> dict[str, JobTimes]:
        """Run the jobs to their end; return the outcomes of those that have ended, by name.

        Args:
            most: the maximum number of epochs to simulate.
        """
        self._decide()
        epochs = 0
        while self._events and epochs < most:
            self.now, _, name, job = heapq.heappop(self._events)
            if job is None:
                self._end_epoch(name)
                epochs += 1
            else:
                self.policy.add(job, self.now)
                self._decide()
        left = {name for _, _, name, _ in self._events} | self.policy.entries.keys()
        return {name: found for name, found in self.outcomes.items() if name not in left}

    def _push(self, time: float, name: str, job: SimulatedJob | None = None) -> None:
        heapq.heappush(self._events, (time, next(self._number), name, job))

    def _end_epoch(self, name: str) -> None:
        left = max(0, self.policy.entries[name].epochs - 1)
        self.policy.end_epoch(name, self.now, left)
        if not left:
            self.policy.remove(name, self.now)
            self.outcomes[name].stops.append(self.now)
            self._decide()
        elif name in self._decide():
            self.policy.pause(name, self.now)
            self.outcomes[name].stops.append(self.now)
            self._decide()
        else:
            self._push(self.now + self._seconds[name], name)

    def _decide(self) -> tuple[str, ...]:
        """Start the jobs that the policy starts; return the names of those that it pauses."""
        decision = self.policy.decide(self.now)
        for name in decision.start:
            outcome = self.outcomes[name]
            waited = self.now - self.policy.entries[name].since
            outcome.longest_wait = max(outcome.longest_wait, waited)
            outcome.starts.append(self.now)
            self.policy.start(name, self.now)
            self._push(self.now + self.overhead + self._seconds[name], name)
        return decision.pause


def simulate(jobs: Iterable[SimulatedJob], policy: Policy, *, overhead: float = 0.0) -> dict[str, JobTimes]:
    """Return the outcomes of jobs under a policy, by name.

    Args:
        jobs: the jobs.
        policy: the policy, with an empty queue.
        overhead: the seconds between the start of a job, also after a pause, and its first epoch.
    """
    simulation = Simulation(policy, overhead=overhead)
    for job in jobs:
        simulation.add(job)
    return simulation.run()


def forecast(policy: Policy, now: float) -> dict[str, JobTimes]:
    """Return the expected outcomes of the jobs in a queue, if no other job arrives.

    An epoch whose seconds are unknown is assumed to take as long as the mean of the others. There is no
    forecast if no epoch length is known, or for jobs that would end after 10,000 simulated epochs.

    Args:
        policy: the policy, which is left as it is.
        now: the present time.
    """
    known = [entry.seconds for entry in policy.entries.values() if entry.seconds is not None]
    if not known:
        return {}
    simulation = Simulation(copy.deepcopy(policy), now=now)
    for entry in policy.entries.values():
        seconds = statistics.fmean(known) if entry.seconds is None else entry.seconds
        simulation.adopt(entry.name, seconds)
    return simulation.run(FORECAST_EPOCHS)
