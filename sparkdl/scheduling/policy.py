"""The policy of a scheduler: which jobs run, which are paused at the end of their epoch, which back-fill.

It is arithmetic on times that the caller passes in, without threads, Spark or Keras. So the tests and the
benchmark simulate days of a queue with the code that ``Scheduler`` runs.

Jobs are ranked by

1. their level: the priority, plus one for every ``aging`` seconds that they have waited;
2. the use of their share: the slot-seconds of its jobs divided by its weight, in whole time slices. A share
   that gets jobs again starts with at least the use of the least served share, like a process that wakes up
   in Linux's Completely Fair Scheduler;
3. their own slot-seconds so far, in queues that double: [0, 1), [1, 3), [3, 7), ... time slices. This is the
   discretized two-dimensional least attained service of Tiresias (Gu et al., NSDI 2019). It needs no
   estimate of a job's length, and lets short jobs pass long ones;
4. the order of their arrival.

The first job that does not fit beside the jobs before it is the head. The jobs behind it may use the leftover
slots only if this does not delay the head. This is EASY back-fill (Lifka, 1995), which Slurm uses too,
applied to epochs instead of whole jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.core.validation import positive_number, positive_seconds, require_flag, whole_number
from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The properties of a job that a policy knows when the job arrives.

    Attributes:
        name: the name, which no other job in the queue has.
        slots: the slots that it needs, all at once.
        epochs: the number of epochs to train.
        priority: the priority; higher is first.
        share: the share that it belongs to.
        seconds: the estimated seconds of an epoch; None if they are unknown.
    """

    name: str
    slots: int
    epochs: int
    priority: int = 0
    share: str = ""
    seconds: float | None = None


@dataclass
class Entry:
    """A job in the queue. All times are seconds on the caller's clock.

    Attributes:
        spec: the properties of the job.
        number: the number of jobs that arrived before it.
        arrival: the time of its arrival.
        since: the time since which it runs or waits.
        epochs: the number of epochs left.
        seconds: the seconds of its last epoch; the estimate before an epoch has ended; None if unknown.
        running: whether it holds its slots.
        began: the time at which its epoch began, if it runs.
        counted: the time up to which its service is counted, if it runs.
        service: the slot-seconds that it has used.
        level: the level at which it was started.
    """

    spec: JobSpec
    number: int
    arrival: float
    since: float
    epochs: int
    seconds: float | None
    running: bool = False
    began: float = 0.0
    counted: float = 0.0
    service: float = 0.0
    level: int = 0

    @property
    def name(self) -> str:
        """The job's name."""
        return self.spec.name

    @property
    def slots(self) -> int:
        """The slots that it needs."""
        return self.spec.slots

    def left(self, now: float) -> float:
        """Return the seconds that its remaining epochs take; 0 if they are unknown."""
        if self.seconds is None:
            return 0.0
        return max(0.0, self.epochs * self.seconds - (now - self.began if self.running else 0.0))

    def is_bound_past(self, time: float, now: float) -> bool:
        """Return True if it runs, and its current epoch may end after a time."""
        return (
            self.running and self.began < now and (self.seconds is None or self.began + self.seconds > time)
        )


@dataclass(frozen=True)
class Decision:
    """The changes to make now.

    Attributes:
        start: the names of the waiting jobs to start.
        pause: the names of the running jobs to pause if their present epoch ends before the next decision.
        backfill: the names of the jobs that may use slots which the head does not need yet.
        head: the name of the first job that has to wait, or is to be paused, for lack of slots.
    """

    start: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    backfill: tuple[str, ...] = ()
    head: str | None = None


@dataclass
class Policy:
    """The queue of a scheduler, and the rules by which it shares slots.

    A job that waits, of priority p among priorities of at most P, starts within

        aging x (P - p + 1) + (N + 1) x (time_slice + 2 E) seconds,

    where N is the number of other jobs, and E the longest epoch with the start before it. After the first
    term its level is above all priorities, and above the level of every job that began to wait at least that
    much later. Each of the N others then has at most one turn: it keeps the level of its start for a time
    slice, and then completes its epoch.

    Attributes:
        slots: the slots that running jobs share.
        time_slice: the slot-seconds after which a job makes room for jobs of its level with less service.
            With infinity, jobs of one priority run in the order of their arrival, and no bound holds.
        aging: the seconds of waiting that count as much as one step of priority; may be infinity.
        shares: the weights of shares by name; 1 for a share that is not named.
        backfill: whether jobs may use slots that the head does not need yet.
        entries: the jobs by name.
        use: the weighted slot-seconds of each share.

    Raises:
        ConfigError: a setting is invalid.
    """

    slots: int
    time_slice: float = 300.0
    aging: float = 3600.0
    shares: Mapping[str, float] = field(default_factory=dict)
    backfill: bool = True
    entries: dict[str, Entry] = field(default_factory=dict)
    use: dict[str, float] = field(default_factory=dict)
    arrived: int = 0

    def __post_init__(self) -> None:
        whole_number("slots", self.slots)
        positive_seconds("time_slice", self.time_slice)
        positive_seconds("aging", self.aging)
        require_flag("backfill", self.backfill)
        if not isinstance(self.shares, Mapping):
            raise ConfigError(f"shares should be a dict from name to weight; got {self.shares!r}.")
        for share, weight in self.shares.items():
            positive_number(f"The weight of the share {share!r}", weight, unit="units")
        self.shares = dict(self.shares)

    def add(self, spec: JobSpec, now: float) -> None:
        """Add a job that waits."""
        self._count(now)
        present = {entry.spec.share for entry in self.entries.values()}
        if spec.share not in present:
            least = min((self.use[share] for share in present), default=0.0)
            self.use[spec.share] = max(self.use.get(spec.share, 0.0), least)
        self.entries[spec.name] = Entry(
            spec, number=self.arrived, arrival=now, since=now, epochs=spec.epochs, seconds=spec.seconds
        )
        self.arrived += 1

    def start(self, name: str, now: float) -> None:
        """Give a waiting job its slots."""
        self._count(now)
        entry = self.entries[name]
        entry.level = self.level(entry, now)
        entry.running, entry.since, entry.began, entry.counted = True, now, now, now

    def end_epoch(self, name: str, now: float, epochs: int) -> None:
        """Record the end of an epoch of a running job, and the number of epochs left."""
        self._count(now)
        entry = self.entries[name]
        entry.seconds, entry.began, entry.epochs = now - entry.began, now, epochs

    def pause(self, name: str, now: float) -> None:
        """Take the slots of a running job, which waits from now on."""
        self._count(now)
        entry = self.entries[name]
        entry.running, entry.since = False, now

    def remove(self, name: str, now: float) -> None:
        """Remove a job that has ended."""
        self._count(now)
        del self.entries[name]

    def level(self, entry: Entry, now: float) -> int:
        """Return a job's level; after a time slice, the level of a running job is its priority."""
        if entry.running:
            return entry.level if now - entry.since < self.time_slice else entry.spec.priority
        return entry.spec.priority + int((now - entry.since) / self.aging)

    def ranked(self, now: float) -> list[Entry]:
        """Return the jobs in the order of their rank."""
        self._count(now)
        return sorted(self.entries.values(), key=lambda entry: self._rank(entry, now))

    def decide(self, now: float) -> Decision:
        """Return the changes to make now.

        Call it after every change, and apply ``start`` at once. Pause the jobs in ``pause`` when their epoch
        ends, unless a later decision replaces it.
        """
        kept: list[Entry] = []
        behind: list[Entry] = []
        free, head = self.slots, None
        for entry in self.ranked(now):
            if head is not None:
                behind.append(entry)
            elif entry.slots <= free:
                kept.append(entry)
                free -= entry.slots
            else:
                head = entry
        idle = self.slots - sum(entry.slots for entry in self.entries.values() if entry.running)
        start: list[Entry] = []
        backfilled: list[Entry] = []
        waiting = [entry for entry in kept if not entry.running]
        while waiting and waiting[0].slots <= idle:
            idle -= waiting[0].slots
            start.append(waiting.pop(0))
        if head is not None and self.backfill and not waiting:  # else the waiting jobs need all free slots
            backfilled = self._backfilled(head, kept, behind, now)
        for entry in backfilled:
            if not entry.running and entry.slots <= idle:
                idle -= entry.slots
                start.append(entry)
        names = {entry.name for entry in kept + backfilled}
        return Decision(
            start=tuple(entry.name for entry in start),
            pause=tuple(e.name for e in self.entries.values() if e.running and e.name not in names),
            backfill=tuple(entry.name for entry in backfilled),
            head=None if head is None else head.name,
        )

    def _count(self, now: float) -> None:
        """Count the service of running jobs up to now."""
        for entry in self.entries.values():
            if entry.running:
                service = entry.slots * (now - entry.counted)
                entry.service += service
                entry.counted = now
                self.use[entry.spec.share] += service / self.shares.get(entry.spec.share, 1.0)

    def _rank(self, entry: Entry, now: float) -> tuple[int, int, int, int]:
        return (
            -self.level(entry, now),
            int(self.use[entry.spec.share] / self.time_slice),
            self._queue(entry),
            entry.number,
        )

    def _queue(self, entry: Entry) -> int:
        return int(math.log2(1 + entry.service / self.time_slice))

    def _backfilled(self, head: Entry, kept: list[Entry], behind: list[Entry], now: float) -> list[Entry]:
        """Return the jobs behind the head that do not delay it, whichever of the kept jobs leave first."""
        free = self.slots - sum(entry.slots for entry in kept)
        missing = head.slots - free
        sums = {0}  # the number of slots of each subset of the kept jobs
        for entry in kept:
            sums |= {each + entry.slots for each in sums}
        spare = min(each for each in sums if each >= missing) - missing
        start = self._earliest(head, kept, missing, now)
        bound = {entry.name for entry in behind if entry.is_bound_past(start, now)}
        found = []
        for entry in sorted(behind, key=lambda entry: entry.name not in bound):
            fits, stays = entry.slots <= min(spare, free), entry.name in bound
            in_time = entry.slots <= free and entry.seconds is not None and now + entry.seconds <= start
            if fits or stays:
                spare -= entry.slots
            if fits or stays or in_time:
                free -= entry.slots
            if fits or (in_time and not stays):
                found.append(entry)
        return found

    def _earliest(self, head: Entry, kept: list[Entry], missing: int, now: float) -> float:
        """Return the earliest time at which kept jobs may have freed ``missing`` slots for the head."""
        freed = 0
        for leaves, slots in sorted((self._leaves(entry, head, now), entry.slots) for entry in kept):
            freed += slots
            if freed >= missing:
                return leaves
        return now

    def _leaves(self, entry: Entry, head: Entry, now: float) -> float:
        """Return the earliest time at which a job before the head may be done or be outranked by the head."""
        times = [entry.left(now)]
        if not head.running:  # until the head's level rises
            times.append(self.aging - (now - head.since) % self.aging)
        if math.isfinite(self.time_slice):
            limit = (2 ** (self._queue(entry) + 1) - 1) * self.time_slice
            times.append((limit - entry.service) / entry.slots)
            if entry.spec.share != head.spec.share:
                times.append(self._seconds_of_share(entry))
            if entry.running and entry.level > entry.spec.priority:  # until it loses the level of its start
                times.append(max(0.0, entry.since + self.time_slice - now))
        return now + min(times)

    def _seconds_of_share(self, entry: Entry) -> float:
        """Return the least seconds until a job's share may have used up its current time slice."""
        left = self.time_slice - self.use[entry.spec.share] % self.time_slice
        return left * self.shares.get(entry.spec.share, 1.0) / self.slots
