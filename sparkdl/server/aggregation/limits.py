"""Limits on the time that a request waits at the endpoint, and on the memory that requests take."""

# Seconds that a request may wait before the endpoint replies that the worker should ask again.
PATIENCE = 20.0
# Bytes kept of bodies that arrive before their turn, or of centers on their way to a worker.
EARLY_BYTES = 64 << 20
# Minimum number of exchanges under way without rounds, so that one slow worker does not block the others.
LEAST_EARLY = 2
# Bytes of mean gradients that hybrid rounds keep for late workers.
KEPT_BYTES = 64 << 20
# Minimum number of mean gradients that hybrid rounds keep, whatever their size.
LEAST_KEPT = 4
# Number of bodies of late workers that are read in addition to the others, whatever their size.
STRAGGLERS = 3
# Number of elements of a hogwild center that one lock guards.
STRIPE = 1 << 16
# Updates of this staleness or more are counted together.
MOST_STALE = 32
