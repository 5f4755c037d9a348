"""Virtual time: one thread runs at a time, over the real coordinator, rules and training loop.

A thread yields only in a sleep or a wait for the coordinator; then the thread with the earliest wake-up time
runs. So a run of hundreds of workers of any speeds takes no longer than its arithmetic, and repeats exactly.
"""

import heapq
import itertools
import math
import threading


class DeadlockError(AssertionError):
    """Deadlock: every thread waits for another one."""


class World:
    """A virtual clock and its threads.

    Args:
        limit: the time at which a run that has not ended counts as hung.

    Attributes:
        patience: seconds between repeated looks of a polling thread.
        now: seconds since the start of the world.
        running: the thread whose turn it is.
    """

    patience = math.inf

    def __init__(self, limit=math.inf):
        self.limit = limit
        self.now, self.error, self.over = 0.0, None, False
        self._threads, self._queue, self._numbers = [], [], itertools.count()
        self.running, self._gave_way = None, threading.Semaphore(0)

    def spawn(self, function, *arguments):
        """Add a thread that starts now."""
        thread = _Thread(self, function, arguments)
        self._threads.append(thread)
        self.wake(thread, self.now)

    def run(self):
        """Run until every thread has ended, or raise the exception of one that failed."""
        try:
            while self.error is None and not all(thread.ended for thread in self._threads):
                self.now, thread = self._next()
                self._let(thread)
        finally:
            self.over = True
            for thread in self._threads:
                while not thread.ended:
                    self._let(thread)
        if self.error is not None:
            raise self.error

    def sleep(self, seconds):
        """Let other threads run for ``seconds``."""
        self.wake(self.running, self.now + seconds)
        self.give_way()

    def live_in(self, coordinator):
        """Make waits for a coordinator use this world's time."""
        coordinator.state.changed, coordinator.aggregation.changed = Condition(self), Condition(self)
        coordinator.aggregation.lock, coordinator.aggregation.clock = (
            coordinator.state.changed,
            lambda: self.now,
        )

    def wake(self, thread, when):
        """Wake a thread at ``when``, unless it wakes earlier."""
        heapq.heappush(self._queue, (when, next(self._numbers), thread.turns, thread))

    def give_way(self):
        """Let other threads run until this one is woken."""
        thread = self.running
        self._gave_way.release()
        thread.turn.acquire()
        if self.over:
            raise _Over

    def _next(self):
        while self._queue:
            when, _, turns, thread = heapq.heappop(self._queue)
            if turns == thread.turns and not thread.ended:
                if when > self.limit:
                    break
                return when, thread
        raise DeadlockError(
            f"{sum(not thread.ended for thread in self._threads)} threads wait for each other."
        )

    def _let(self, thread):
        thread.turns += 1
        self.running = thread
        thread.turn.release()
        self._gave_way.acquire()


class _Over(BaseException):
    """An exception that ends a thread whose world has ended."""


class _Thread:
    """A thread that runs when it is its turn; ``turns`` invalidates wake-ups of earlier turns."""

    def __init__(self, world, function, arguments):
        self.turn, self.turns, self.ended = threading.Semaphore(0), 0, False
        self._work = world, function, arguments
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        world, function, arguments = self._work
        self.turn.acquire()
        try:
            if not world.over:
                function(*arguments)
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by World.run, in the thread of the test
            world.error = world.error or error
        self.ended = True
        world._gave_way.release()


class Condition:
    """A threading.Condition for a world where only one thread runs at a time."""

    def __init__(self, world):
        self.world, self.waiting = world, []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def notify_all(self):
        """Wake the threads whose predicate holds."""
        for waiting in self.waiting:
            if waiting[1]():
                self.world.wake(waiting[0], self.world.now)

    def wait(self, timeout=None):
        """Wait for a notification, or for ``timeout`` seconds."""
        self._wait(lambda: True, timeout)

    def wait_for(self, predicate, timeout=None):
        """Wait until the predicate holds, or for ``timeout`` seconds; return its last value."""
        end = None if timeout is None else self.world.now + timeout
        while not (result := predicate()) and (end is None or self.world.now < end):
            self._wait(predicate, None if end is None else end - self.world.now)
        return result

    def _wait(self, predicate, timeout):
        world = self.world
        waiting = world.running, predicate
        self.waiting.append(waiting)
        if timeout is not None:
            world.wake(world.running, world.now + timeout)
        world.give_way()
        self.waiting.remove(waiting)
