"""What differs between TensorFlow, JAX and torch, behind one interface: ``Replica``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.core.sparse_gradients import Tables, tables_of
from sparkdl.core.vectors import Layout
from sparkdl.errors import ConfigError
from sparkdl.rules import FedOpt
from sparkdl.rules.outer import Outer

if TYPE_CHECKING:
    import keras

    from sparkdl.modeling.backends.base import Replica

SUPPORTED = ("tensorflow", "jax", "torch")


def require_supported(backend: str) -> None:
    """Check that workers can train on this Keras backend.

    Raises:
        ConfigError: they cannot.
    """
    if backend not in SUPPORTED:
        raise ConfigError(
            f"Keras runs on the {backend} backend here, and sparkdl trains on {', '.join(SUPPORTED)}. Set "
            "KERAS_BACKEND to one of them before keras is imported."
        )


def with_keras_optimizer(merge: Any) -> Any:
    """Return a rule that steps by a Keras optimizer, if it was given one, and anything else as it is.

    Raises:
        ConfigError: it was given something else.
    """
    if not isinstance(merge, FedOpt) or isinstance(merge.optimizer, Outer):
        return merge
    import keras

    from sparkdl.modeling.backends.outer import KerasOuter

    if not isinstance(merge.optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "The optimizer of FedOpt should be one of sparkdl.rules.outer or of keras.optimizers; got "
            f"{merge.optimizer!r}."
        )
    return replace(merge, optimizer=KerasOuter(merge.optimizer))


def make_replica(model: keras.Model, *, joint: bool) -> Replica:
    """Return the replica of a compiled model on the backend that Keras runs on."""
    backend = _backend()
    if backend == "jax":
        from sparkdl.modeling.backends.jax import JaxReplica

        return JaxReplica(model, joint=joint)
    if backend == "torch":
        from sparkdl.modeling.backends.torch import TorchReplica

        return TorchReplica(model, joint=joint)
    from sparkdl.modeling.backends.tensorflow import TensorFlowReplica

    return TensorFlowReplica(model, joint=joint)


def _backend() -> str:
    import keras

    name = str(keras.backend.backend())
    require_supported(name)
    return name


def prepare_backend(threads: int) -> None:
    """Bound the backend's threads; JAX has taken them from the environment when it was imported."""
    backend = _backend()
    if backend == "torch":
        from sparkdl.modeling.backends import torch

        torch.set_threads(threads)
    elif backend == "tensorflow":
        from sparkdl.modeling.backends import tensorflow

        tensorflow.set_threads(threads)


def sliced_tables(layout: Layout, *, joint: bool) -> Tables:
    """Return the trainable variables as tables where workers exchange gradients with slices, else nothing."""
    return tables_of(layout) if joint and _backend() == "tensorflow" else ()


def has_gpu() -> bool:
    """Return whether the backend computes on a GPU."""
    return bool(importlib.import_module(f"sparkdl.modeling.backends.{_backend()}").has_gpu())


def require_distribution(backend: str, distribution: object) -> None:
    """Check that a worker may use several devices on this backend in the way that was asked for.

    Raises:
        ConfigError: it may not.
    """
    if distribution is not None and (backend != "jax" or not callable(distribution)):
        raise ConfigError(
            "distribution should be a function without arguments that returns a keras.distribution object, "
            f"with Keras on JAX; got {distribution!r} on {backend}."
        )


@contextmanager
def distributed(make: Callable[[], Any] | None, num_gpus: int) -> Iterator[bool]:
    """Spread models that are made in a ``with`` block over the devices of this task; yields whether they are.

    Args:
        make: returns the distribution; None is keras.distribution.DataParallel over several GPUs.
        num_gpus: how many GPUs the task has.
    """
    import keras

    if make is None and num_gpus > 1 and _backend() == "jax":
        make = keras.distribution.DataParallel
    if make is None:
        yield False
        return
    keras.distribution.set_distribution(make())
    try:
        yield True
    finally:
        keras.distribution.set_distribution(None)
