"""One fit on the driver: its worker group, checkpoints, callbacks and metrics."""
