"""What differs between TensorFlow, JAX and torch, behind one interface: ``Replica``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError

if TYPE_CHECKING:
    import keras

    from sparkdl.backends.base import Replica

SUPPORTED = ("tensorflow",)


def require_supported(backend: str) -> None:
    """Check that workers can train on this Keras backend.

    Raises:
        ConfigError: they cannot.
    """
    if backend not in SUPPORTED:
        raise ConfigError(
            f"Keras runs on the {backend} backend here, and sparkdl trains on {', '.join(SUPPORTED)} "
            "so far. Set KERAS_BACKEND=tensorflow before keras is imported."
        )


def make_replica(model: keras.Model, *, joint: bool) -> Replica:
    """Return the replica of a compiled model on the backend that Keras runs on."""
    import keras

    require_supported(keras.backend.backend())
    from sparkdl.backends.tensorflow import TensorFlowReplica

    return TensorFlowReplica(model, joint=joint)


def prepare_backend(threads: int) -> None:
    """Bound the backend's threads in a process that has not used it yet."""
    from sparkdl.backends import tensorflow

    tensorflow.set_threads(threads)
