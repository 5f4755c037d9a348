"""Limits on how long the endpoint lets a request wait, and on what it keeps in memory."""

# Seconds that a request may wait before its worker is told to ask again.
PATIENCE = 20.0
# Bytes kept of bodies that arrive before their turn, or of centers on their way to a worker.
EARLY_BYTES = 64 << 20
# Exchanges without rounds under way at least, so that one slow worker does not keep the others out.
LEAST_EARLY = 2
# Bytes of mean gradients that hybrid rounds keep for workers that are late.
KEPT_BYTES = 64 << 20
# Mean gradients that hybrid rounds keep at least, whatever their size.
LEAST_KEPT = 4
# Bodies of late workers that are read beside those of the others, whatever their size.
STRAGGLERS = 3
# Elements of a hogwild center that one lock guards.
STRIPE = 1 << 16
