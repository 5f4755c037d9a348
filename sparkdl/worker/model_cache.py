"""The newest models of this process, kept compiled for later tasks.

Cross-validation and other fits in turn would trace each model again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from sparkdl.core.vectors import LARGE, trim
from sparkdl.modeling.backends import make_replica
from sparkdl.modeling.backends.base import Replica
from sparkdl.modeling.configuration import Objects
from sparkdl.modeling.serialization import ModelSpec, restore, thaw

KEPT = 4  # the most models that a process keeps
KEPT_BYTES = 32 << 20  # the most bytes that they have together: of large ones only the newest is kept
# The newest models of this process, compiled functions and all, each with its bytes; the newest is the last.
_kept: dict[tuple[str, bool | None], tuple[Any, int]] = {}


def take_replica(
    spec: ModelSpec, objects: Objects, builder: Callable[[], Any] | None, *, joint: bool
) -> Replica:
    """Return a replica with the values of a spec, the compiled one of an earlier task where it fits."""

    def make() -> Replica:
        return make_replica(thaw(spec, objects, builder), joint=joint)

    replica: Replica = _take(spec, joint, make)
    return replica


def take_model(spec: ModelSpec, objects: Objects, builder: Callable[[], Any] | None) -> Any:
    """Return a model that predicts, with the values of a spec: that of an earlier task where it fits."""
    for joint in (False, True):
        if (spec.key, joint) in _kept:
            return take_replica(spec, objects, builder, joint=joint).model
    return _take(spec, None, lambda: thaw(spec, objects, builder))


def _take(spec: ModelSpec, joint: bool | None, make: Callable[[], Any]) -> Any:
    """Return the model that is kept for a spec, or make it, and set its values; evict older ones."""
    key = spec.key, joint
    if key in _kept:
        made, nbytes = _kept.pop(key)
        restore(made if joint is None else made.model, spec)
    else:
        nbytes = sum(array.nbytes for array in (*spec.weights, *spec.optimizer))
        evicted = 0
        while len(_kept) >= KEPT or _kept and nbytes + sum(each for _, each in _kept.values()) > KEPT_BYTES:
            evicted += _kept.pop(next(iter(_kept)))[1]
        if evicted > LARGE:
            gc.collect()  # A model and what is compiled of it know each other, so that they would stay.
            trim(evicted)
        made = make()
    _kept[key] = made, nbytes
    return made


def clear() -> None:
    """Drop all models, as is needed where variables lie on the devices of one task."""
    _kept.clear()
