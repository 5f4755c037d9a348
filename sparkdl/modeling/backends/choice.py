"""Choice of the backend, TensorFlow, JAX or torch: its replica, its threads and its devices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
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
    """Raise an error if workers cannot train on this Keras backend.

    Raises:
        ConfigError: the backend is not supported.
    """
    if backend not in SUPPORTED:
        raise ConfigError(
            f"KERAS_BACKEND should be one of {', '.join(SUPPORTED)} for sparkdl; got {backend}. Set it "
            "before keras is imported."
        )


def with_keras_optimizer(merge: Any) -> Any:
    """Return a FedOpt rule that steps with its Keras optimizer; return anything else unchanged.

    Raises:
        ConfigError: the optimizer of the rule is neither one of Keras nor one of ``sparkdl.rules.outer``.
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
    """Return the replica of a compiled model on Keras's backend.

    Args:
        model: the compiled model.
        joint: whether all workers make each update together, and therefore exchange gradients.
    """
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
    """Limit the backend's threads. JAX reads its limit from the environment when it is imported."""
    backend = _backend()
    if backend == "torch":
        from sparkdl.modeling.backends import torch

        torch.set_threads(threads)
    elif backend == "tensorflow":
        from sparkdl.modeling.backends import tensorflow

        tensorflow.set_threads(threads)


def sliced_tables(layout: Layout, *, joint: bool) -> Tables:
    """Return a Table for each trainable variable in synchronous/"batch" on TensorFlow, otherwise ()."""
    return tables_of(layout) if joint and _backend() == "tensorflow" else ()


def averages_slices(model: keras.Model) -> bool:
    """Return True if workers can average the gradients of embeddings among themselves."""
    from sparkdl.modeling import optimizers

    return _backend() != "tensorflow" or optimizers.adds_slices(model) or optimizers.refuses_slices(model)


def averages_embeddings(model: keras.Model) -> bool:
    """Return True if workers can average the model's gradients, judged by its layers and its optimizer."""
    import keras

    from sparkdl.modeling import keras_internals

    tables = [each for each in keras_internals.flat_layers(model) if isinstance(each, keras.layers.Embedding)]
    if getattr(model, "optimizer", None) is None or not any(each.trainable_variables for each in tables):
        return True
    return averages_slices(model)


def require_averageable(
    model: keras.Model, row: Sequence[Any], builder: Any = None, objects: Any = None
) -> None:
    """Require gradients that workers can average among themselves, judged by the gradients of some rows.

    Args:
        model: a compiled and built model.
        row: x, y and weights of some rows.
        builder: the function that built the model, if any.
        objects: custom objects that the model needs.

    Raises:
        ModelError: the gradients have slices, and the optimizer does not simply add them up.
    """
    if averages_slices(model):
        return
    from sparkdl.modeling.backends import tensorflow

    if tensorflow.has_slices(model, row, builder, objects):
        raise tensorflow.cannot_average(model)


def has_gpu() -> bool:
    """Return True if the backend computes on a GPU."""
    return bool(importlib.import_module(f"sparkdl.modeling.backends.{_backend()}").has_gpu())


def require_distribution(backend: str, distribution: object) -> None:
    """Raise an error if a worker cannot spread its model over devices with this distribution.

    Raises:
        ConfigError: the backend is not JAX, or the distribution is not callable.
    """
    if distribution is not None and (backend != "jax" or not callable(distribution)):
        raise ConfigError(
            "distribution should be a function without arguments that returns a keras.distribution object, "
            f"and it needs the JAX backend; got {distribution!r} on {backend}."
        )


@contextmanager
def distributed(make: Callable[[], Any] | None, num_gpus: int) -> Iterator[bool]:
    """Spread models made in a ``with`` block over this task's devices; yield True if they are spread.

    Args:
        make: the function that returns the distribution. None: a task with several GPUs uses
            keras.distribution.DataParallel on JAX, and any other task has no distribution.
        num_gpus: number of GPUs that the task has.
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
