"""Limits on the time that a request waits at the endpoint, and on the memory that requests take."""

# Seconds that a request may wait before the endpoint replies that the worker should ask again.
PATIENCE = 20.0
# The same for an update whose body may not be read yet; less than the ``TIMEOUT`` of ``transport.client``.
BODY_PATIENCE = 60.0
# Maximum bytes of the bodies that are read before their turn in a round; without rounds, of all vectors of
# exchanges under way.
EARLY_BYTES = 64 << 20
# Without rounds, this many exchanges may always be under way, so that one slow worker does not block others.
LEAST_EARLY = 2
# Maximum bytes of mean gradients that hybrid rounds keep for late workers.
KEPT_BYTES = 64 << 20
# Minimum number of mean gradients that hybrid rounds keep, whatever their size.
LEAST_KEPT = 4
# In hybrid rounds, a body of any size may be read while few other bodies are being read: at most this many,
# and at most as many as there are workers beyond the quorum.
STRAGGLERS = 3
# Number of elements of a hogwild center that one lock guards.
STRIPE = 1 << 16
# Updates of this staleness or more are counted together.
MOST_STALE = 32
