"""The models that this process used most recently, kept compiled for later tasks.

Without them, cross-validation and other series of fits would trace each model again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from sparkdl.core.vectors import LARGE, trim
from sparkdl.modeling.backends.base import Replica
from sparkdl.modeling.backends.choice import make_replica
from sparkdl.modeling.configuration import Objects
from sparkdl.modeling.keras_types import Model
from sparkdl.modeling.serialization import ModelSpec, restore, thaw

KEPT = 4  # maximum number of models that a process keeps
KEPT_BYTES = 32 << 20  # maximum size of all of them; of large models only the newest is kept
# By spec and ``joint`` (None: a model for prediction): the replica or model, with its compiled
# functions, and the size of its arrays in bytes. The most recently used one is the last.
_kept: dict[tuple[str, bool | None], tuple[Any, int]] = {}


def take_replica(
    spec: ModelSpec, objects: Objects, builder: Callable[[], Model] | None, *, joint: bool
) -> Replica:
    """Return a replica with the values of a spec: the compiled one of an earlier task if it fits.

    ``joint``: True for a replica that computes gradients for joint updates (synchronous/"batch").
    """

    def make() -> Replica:
        return make_replica(thaw(spec, objects, builder), joint=joint)

    replica: Replica = _take(spec, joint, make)
    return replica


def take_model(spec: ModelSpec, objects: Objects, builder: Callable[[], Model] | None) -> Model:
    """Return a model for prediction with the values of a spec: the one of an earlier task if it fits."""
    for joint in (False, True):
        if (spec.key, joint) in _kept:
            return take_replica(spec, objects, builder, joint=joint).model
    return _take(spec, None, lambda: thaw(spec, objects, builder))


def _take(spec: ModelSpec, joint: bool | None, make: Callable[[], Any]) -> Any:
    """Return the model kept for a spec, with its values set; or make it and evict older ones."""
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
            gc.collect()  # A model and its compiled functions refer to each other, so they would stay.
            trim(evicted)
        made = make()
    _kept[key] = made, nbytes
    return made


def clear() -> None:
    """Drop all models. This is needed if variables lie on the devices of a single task."""
    _kept.clear()
