"""The trace of a fit, in Chrome's Trace Event Format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparkdl.transport.messages import Interval

MICROSECONDS = 1e6  # per second


def trace_of(intervals: Iterable[tuple[int, Interval]], hosts: Mapping[int, str]) -> dict[str, Any]:
    """Return the trace of some intervals, ready for JSON; time 0 is the start of the first interval.

    Args:
        intervals: intervals, each with its worker.
        hosts: the host of each worker.
    """
    ordered = sorted(intervals, key=lambda each: each[1].start)
    first = ordered[0][1].start if ordered else 0.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": worker, "args": {"name": f"worker {worker} on {host}"}}
        for worker, host in sorted(hosts.items())
    ]
    events += [
        {
            "ph": "X",
            "name": each.activity,
            "cat": "worker",
            "pid": worker,
            "tid": 0,
            "ts": round(MICROSECONDS * (each.start - first), 1),
            "dur": round(MICROSECONDS * each.seconds, 1),
        }
        for worker, each in ordered
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
