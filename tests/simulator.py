"""Virtual time: threads of which one runs at a time, over the real store, rules and training loop.

A thread gives way only where it sleeps or waits for a store; then the one whose time has come first goes
on. So a run of hundreds of workers of any speeds takes no longer than its arithmetic, and repeats exactly.
"""

import heapq
import itertools
import math
import threading


class DeadlockError(AssertionError):
    """Every thread waits for another one."""


class World:
    """A clock, and the threads that live by it.

    Args:
        limit: when a run that is not over hangs: whoever waits for a store asks again and again.

    Attributes:
        patience: how long somebody waits who looks at something again and again.
        now: seconds since the world began.
        running: the thread whose turn it is.
    """

    patience = math.inf

    def __init__(self, limit=math.inf):
        self.limit = limit
        self.now, self.error, self.over = 0.0, None, False
        self._threads, self._queue, self._numbers = [], [], itertools.count()
        self.running, self._gave_way = None, threading.Semaphore(0)

    def spawn(self, function, *arguments):
        """Add a thread that begins at this moment."""
        thread = _Thread(self, function, arguments)
        self._threads.append(thread)
        self.wake(thread, self.now)

    def run(self):
        """Let time pass until every thread has ended, or one has failed, whose exception is raised."""
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
        """Let others run for so long."""
        self.wake(self.running, self.now + seconds)
        self.give_way()

    def live_in(self, store):
        """Let whoever waits for a store wait in this world."""
        store.state.changed, store.merging.changed = Condition(self), Condition(self)
        store.merging.lock, store.merging.clock = store.state.changed, lambda: self.now

    def wake(self, thread, when):
        """Let a thread go on at this moment, unless it does at an earlier one."""
        heapq.heappush(self._queue, (when, next(self._numbers), thread.turns, thread))

    def give_way(self):
        """Let others run until this thread is woken; return it."""
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
    """Ends a thread whose world has ended."""


class _Thread:
    """A thread that runs when it is its turn. ``turns`` counts them: a waking for an earlier one is void."""

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
    """What threading.Condition is, in a world where nobody runs beside."""

    def __init__(self, world):
        self.world, self.waiting = world, []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def notify_all(self):
        """Wake those whose waiting is over."""
        for waiting in self.waiting:
            if waiting[1]():
                self.world.wake(waiting[0], self.world.now)

    def wait(self, timeout=None):
        """Give way until somebody notifies, or for so many seconds."""
        self._wait(lambda: True, timeout)

    def wait_for(self, predicate, timeout=None):
        """Give way until the predicate holds, or for so many seconds; return what it says then."""
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
