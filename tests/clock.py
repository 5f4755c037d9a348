"""A clock for code that waits, so that no test sleeps."""


class Clock:
    """A clock that advances only during sleeps; each sleep runs the next of the given events."""

    def __init__(self, *events):
        self.now, self.events = 0.0, list(events)

    def sleep(self, seconds):
        self.now += seconds
        if self.events:
            self.events.pop(0)()

    def __call__(self):
        return self.now
