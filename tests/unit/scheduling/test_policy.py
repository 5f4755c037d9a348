"""The policy of a scheduler, tested on simulated queues."""

import copy
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.scheduling.policy import JobSpec, Policy
from sparkdl.scheduling.simulation import SimulatedJob, Simulation, forecast, simulate

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import scheduling

NEVER = math.inf
FIRST_COME = scheduling.FIRST_COME | {"backfill": False}


@st.composite
def queues(draw, shares=("", "a", "b"), known=(False, True)):
    """Draw the slots of an application, and jobs that it can run."""
    slots = draw(st.integers(1, 5))
    jobs = []
    for number in range(draw(st.integers(1, 10))):
        seconds = draw(st.integers(1, 40))
        job = SimulatedJob(
            name=str(number),
            slots=draw(st.integers(1, slots)),
            epochs=draw(st.integers(1, 8)),
            priority=draw(st.integers(-1, 2)),
            share=draw(st.sampled_from(shares)),
            seconds=seconds if draw(st.sampled_from(known)) else None,
            true_seconds=seconds,
            arrival=draw(st.integers(0, 300)),
        )
        jobs.append(job)
    return slots, jobs


settings_of_policies = st.fixed_dictionaries(
    {
        "time_slice": st.sampled_from([10, 60, 400]),
        "aging": st.sampled_from([20, 200, 5000]),
        "backfill": st.booleans(),
        "shares": st.sampled_from([{}, {"a": 3.0}]),
    }
)


class Watched(Policy):
    """A policy that checks the slots of each decision, and that back-fill does not delay the head."""

    def decide(self, now):
        decision = super().decide(now)
        running = {entry.name for entry in self.entries.values() if entry.running}
        used = sum(self.entries[name].slots for name in running | set(decision.start))
        assert used <= self.slots
        assert not running & set(decision.start)
        assert running >= set(decision.pause)
        return decision


class WithPatientHeads(Policy):
    """A policy that compares the head's next start with that of the same queue without back-fill."""

    compared = 0

    def decide(self, now):
        decision = super().decide(now)
        # A job that is paused at this moment still holds its slots until the next decision.
        settled = all(self.entries[name].began < now for name in decision.pause)
        if decision.backfill and settled and not self.entries[decision.head].running:
            assert start_of(decision.head, self, now, backfill=True) <= start_of(
                decision.head, self, now, backfill=False
            )
            type(self).compared += 1
        return decision


def start_of(name, policy, now, *, backfill):
    """Return the next start of a waiting job, if no other job arrives."""
    plain = Policy(policy.slots, policy.time_slice, policy.aging, backfill=backfill)
    plain.entries, plain.use = copy.deepcopy(policy.entries), dict(policy.use)
    return forecast(plain, now)[name].starts[0]


@given(queues(), settings_of_policies, st.sampled_from([0, 7]))
def test_every_job_is_trained_and_no_slot_is_used_twice(queue, settings, overhead):
    """Each job trains all of its epochs, with at least one after each start, on slots of its own."""
    slots, jobs = queue
    outcomes = simulate(jobs, Watched(slots, **settings), overhead=overhead)

    for job in jobs:
        found = outcomes[job.name]
        ran = sum(stop - start for start, stop in zip(found.starts, found.stops, strict=True))
        assert job.epochs * job.true_seconds + len(found.starts) * overhead == ran
        assert len(found.starts) <= job.epochs
        assert job.arrival <= found.starts[0]


@given(queues(), settings_of_policies, st.sampled_from([0, 7]))
def test_no_job_starves(queue, settings, overhead):
    """No job waits longer than the bound in the docstring of the policy."""
    slots, jobs = queue
    outcomes = simulate(jobs, Policy(slots, **settings), overhead=overhead)

    longest = max(job.true_seconds for job in jobs) + overhead
    highest = max(job.priority for job in jobs)
    for job in jobs:
        bound = settings["aging"] * (highest - job.priority + 1)
        bound += len(jobs) * (settings["time_slice"] + 2 * longest)
        assert outcomes[job.name].longest_wait <= bound


def test_a_stream_of_urgent_jobs_does_not_starve_a_job():
    """A stream of urgent jobs delays a job of lower priority only until aging has raised its level."""
    urgent = [
        SimulatedJob(name=str(n), slots=1, epochs=1, true_seconds=10, arrival=10 * n, priority=3)
        for n in range(1000)
    ]
    low = SimulatedJob(name="low", slots=1, epochs=20, true_seconds=10)
    patient = simulate([*urgent, replace(low, arrival=1)], Policy(1, time_slice=30, aging=NEVER))
    aging = simulate([*urgent, replace(low, arrival=1)], Policy(1, time_slice=30, aging=100))

    assert 9000 < patient["low"].starts[0]
    assert aging["low"].longest_wait <= 4 * 100 + 4 * (30 + 2 * 10)  # at most three urgent ones had waited


@given(queues(), settings_of_policies)
def test_the_most_urgent_job_starts_within_an_epoch(queue, settings):
    """A job whose priority is above all others starts as soon as each running job has ended its epoch."""
    slots, jobs = queue
    urgent = SimulatedJob(name="urgent", slots=slots, epochs=2, true_seconds=5, arrival=50, priority=9)
    outcomes = simulate([*jobs, urgent], Policy(slots, **settings | {"aging": NEVER}))

    assert outcomes["urgent"].starts[0] <= 50 + max(job.true_seconds for job in jobs)
    assert 1 == len(outcomes["urgent"].starts)


@given(queues(), st.integers(0, 300))
def test_jobs_before_the_head_have_their_slots_first(queue, now):
    """A job starts before one of a higher rank only by back-fill."""
    slots, jobs = queue
    policy = Policy(slots)
    for job in jobs:
        policy.add(job, 0)
    decision = policy.decide(now)

    ranked = [entry.name for entry in policy.ranked(now)]
    before = ranked if decision.head is None else ranked[: ranked.index(decision.head)]
    assert set(before) == set(decision.start) - set(decision.backfill)


@given(queues(shares=("",), known=(True,)), st.sampled_from([30, 100, NEVER]))
def test_back_fill_does_not_delay_the_head(queue, time_slice):
    """The head starts no later than without back-fill, if estimates are right and no rank rises by aging."""
    slots, jobs = queue

    simulate(jobs, WithPatientHeads(slots, time_slice, NEVER))


def test_heads_were_compared():
    """The generated queues include at least one in which a job is back-filled."""
    jobs = [
        SimulatedJob(name="long", slots=1, epochs=9, seconds=10, true_seconds=10),
        SimulatedJob(name="wide", slots=2, epochs=2, seconds=10, true_seconds=10, arrival=1),
        SimulatedJob(name="short", slots=1, epochs=1, seconds=10, true_seconds=10, arrival=2),
    ]
    before = WithPatientHeads.compared
    outcomes = simulate(jobs, WithPatientHeads(2, NEVER, NEVER))

    assert before < WithPatientHeads.compared
    assert [2, 90] == [outcomes[name].starts[0] for name in ("short", "wide")]


def test_a_job_whose_epoch_is_too_long_does_not_back_fill():
    """A job whose epoch would end after the expected start of the head has to wait behind it."""
    jobs = [
        SimulatedJob(name="long", slots=1, epochs=9, seconds=10, true_seconds=10),
        SimulatedJob(name="wide", slots=2, epochs=2, seconds=10, true_seconds=10, arrival=1),
        SimulatedJob(name="slow", slots=1, epochs=1, seconds=89, true_seconds=89, arrival=2),
    ]
    outcomes = simulate(jobs, Policy(2, NEVER, NEVER))

    assert [90, 110] == [outcomes[name].starts[0] for name in ("wide", "slow")]


def test_slots_that_the_head_never_needs_are_used():
    """A job of unknown length gets slots that remain free even if the head runs."""
    jobs = [
        SimulatedJob(name="long", slots=3, epochs=9, true_seconds=10),
        SimulatedJob(name="wide", slots=3, epochs=2, true_seconds=10, arrival=1),
        SimulatedJob(name="small", slots=1, epochs=99, true_seconds=10, arrival=2),
    ]
    outcomes = simulate(jobs, Policy(4, NEVER, NEVER))

    assert [2, 90] == [outcomes[name].starts[0] for name in ("small", "wide")]


def test_a_long_job_makes_room_after_its_time_slice():
    """A long job is paused at the end of an epoch for a new job, and then continues."""
    long = SimulatedJob(name="long", slots=1, epochs=100, true_seconds=10)
    short = SimulatedJob(name="short", slots=1, epochs=2, true_seconds=10, arrival=5)
    outcomes = simulate([long, short], Policy(1, time_slice=25))

    assert ([0, 50], [30, 1020]) == (outcomes["long"].starts, outcomes["long"].stops)
    assert [30] == outcomes["short"].starts


def test_shares_get_slots_by_their_weights():
    """While two shares have jobs that wait, their slot-seconds are in proportion to their weights."""
    jobs = [
        SimulatedJob(name=f"{share}{number}", slots=1, epochs=6, true_seconds=10, share=share)
        for share, count in (("a", 40), ("b", 10))
        for number in range(count)
    ]
    policy = Policy(2, time_slice=20, aging=NEVER, shares={"b": 2.0})
    outcomes = simulate(jobs, policy)

    last = max(outcomes[job.name].stops[-1] for job in jobs if job.share == "b")
    used = dict.fromkeys("ab", 0.0)
    for job in jobs:
        found = outcomes[job.name]
        used[job.share] += sum(
            min(stop, last) - min(start, last) for start, stop in zip(found.starts, found.stops, strict=True)
        )
    assert 600 == used["b"]
    assert abs(used["a"] - 300) <= 3 * 20


def test_a_share_that_returns_is_not_owed_its_pause():
    """A share that gets jobs again gets its part from then on, without credit for the time before."""
    steady = SimulatedJob(name="steady", slots=1, epochs=400, true_seconds=10, share="a")
    late = SimulatedJob(name="late", slots=1, epochs=100, true_seconds=10, share="b", arrival=2000)
    outcomes = simulate([steady, late], Policy(1, time_slice=20, aging=NEVER))

    waits = zip(outcomes["steady"].stops, outcomes["steady"].starts[1:], strict=False)
    assert max(start - stop for stop, start in waits) <= 60


def test_jobs_that_arrive_together_run_in_their_order_without_time_slices():
    """Without time slices and aging, the policy is first come, first served."""
    jobs = [SimulatedJob(name=str(n), slots=1, epochs=9 - n, true_seconds=10) for n in range(5)]
    outcomes = simulate(jobs, Policy(1, **FIRST_COME))

    assert [0, 90, 170, 240, 300] == [outcomes[job.name].starts[0] for job in jobs]
    assert all(1 == len(found.starts) for found in outcomes.values())


def test_a_hundred_jobs_are_done_sooner_than_first_come_first_served():
    """The mean completion time is at most 0.7 of first come, first served, pauses of 10 s included."""
    ratios = []
    for seed in range(10):
        jobs = scheduling.hundred_jobs(seed)
        mine, first = (scheduling.run(jobs, **settings) for settings in ({}, FIRST_COME))
        ratios.append(scheduling.mean_completion(mine) / scheduling.mean_completion(first))

    assert statistics.fmean(ratios) <= scheduling.BAR


@given(queues(known=(True,)), settings_of_policies)
def test_a_forecast_is_the_simulation_of_the_rest(queue, settings):
    """A forecast at the beginning equals the simulation of the queue, and leaves the queue as it is."""
    slots, jobs = queue
    jobs = [replace(job, arrival=0) for job in jobs]
    policy = Policy(slots, **settings)
    for job in jobs:
        policy.add(job, 0)
    before = copy.deepcopy(policy)
    expected = Simulation(copy.deepcopy(policy))
    for job in jobs:
        expected.adopt(job.name, job.true_seconds)

    assert expected.run() == forecast(policy, 0)
    assert before == policy


def test_a_forecast_of_a_long_queue_ends_early():
    """A forecast has the jobs that end within ten thousand epochs, so that it takes a short time."""
    policy = Policy(2, NEVER)
    for name, epochs in (("short", 10), ("long", 10**9)):
        policy.add(JobSpec(name=name, slots=1, epochs=epochs, seconds=1), 0)

    assert ["short"] == list(forecast(policy, 0))


def test_without_a_known_epoch_there_is_no_forecast():
    """A queue in which no epoch has ended has no forecast."""
    policy = Policy(1)
    policy.add(JobSpec(name="new", slots=1, epochs=3), 0)

    assert {} == forecast(policy, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slots": 0}, "slots should be a whole number of at least 1; got 0"),
        ({"time_slice": 0}, "time_slice should be a positive number of seconds"),
        ({"aging": -1}, "aging should be a positive number of seconds"),
        ({"shares": ["a"]}, "shares should be a dict from name to weight"),
        ({"shares": {"a": 0}}, "share 'a' should be a positive number"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    """The error for an invalid setting states the expected value."""
    with pytest.raises(ConfigError, match=words):
        Policy(**{"slots": 2} | settings)
