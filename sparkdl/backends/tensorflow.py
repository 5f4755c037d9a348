"""Keras on TensorFlow: a compiled function per thing that the loop does.

The gradient of a batch is taken by the model's own ``train_step``, whoever wrote it: while it is traced
the optimizer is one that keeps the gradients instead of applying them.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from sparkdl import models
from sparkdl.backends.base import Batch, Center, Mean, Reading
from sparkdl.weights import ALIGNMENT, Array, Vector, address

LARGE = 1 << 14  # bytes of an array that is worth not to be copied


class Capture(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that keeps the gradients of one step, dense, instead of applying them.

    Args:
        optimizer: the real optimizer, which scales the loss where it must.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.real = optimizer
        self.gradients: list[Any] = []

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the real optimizer does."""
        return self.real.scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients; a variable that got none has a gradient of zeros."""
        # An embedding's gradient is IndexedSlices, which _flat adds up.
        self.gradients = [
            tf.zeros(variable.shape) if gradient is None else gradient
            for gradient, variable in zip(grads, trainable_variables, strict=True)
        ]


class Compiled:
    """A compiled function that knows its traces by the shapes of what it is given.

    ``tf.function`` takes longer to find a trace than a small step takes to run.

    Args:
        function: what is compiled; it is given tensors where arrays come, else what comes.
        jit: whether XLA compiles it.
    """

    def __init__(self, function: Any, jit: bool | None) -> None:
        self._function = tf.function(function, jit_compile=jit, reduce_retracing=True, autograph=False)
        self._traces: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns for arrays, tuples of arrays, None and bools."""
        tensors = _tensors(arguments)
        kind = _kind(arguments)
        if kind not in self._traces:
            self._traces[kind] = self._function.get_concrete_function(*tensors)
        trace = self._traces[kind]
        flat = [part for part in tf.nest.flatten(tensors) if isinstance(part, tf.Tensor)]
        return trace._call_flat(flat, trace.captured_inputs)


def _tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_tensors(part) for part in value)
    return _tensor(value) if isinstance(value, np.ndarray) else value


def _tensor(array: Array) -> Any:
    """Return an array as a tensor: where it lies, if it is large and its address such as TensorFlow wants."""
    shared = array.flags.c_contiguous and array.flags.writeable and array.dtype.kind in "fiu"
    if array.nbytes < LARGE or address(array) % ALIGNMENT or not shared:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _kind(value: Any) -> Any:
    """Return what decides which trace a value needs."""
    if isinstance(value, tuple):
        return tuple(_kind(part) for part in value)
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) else value


class TensorFlowReplica:
    """A replica whose every move is one call of a compiled function.

    Args:
        model: a compiled and built model.
        joint: whether gradients are taken and applied apart, or steps taken whole.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        self.model = model
        self._trainable = models.trainable(model)
        self._statistics = models.statistics(model)
        self.exact = all(variable.dtype == "float32" for variable in self._trainable)
        self._size = sum(int(np.prod(variable.shape, dtype=int)) for variable in self._trainable)
        self._capture = Capture(model.optimizer) if joint else None
        jit = bool(model.jit_compile)
        self._gradient = self._compile(self._take_gradient, jit)
        self._apply_and_take = self._compile(self._apply_and_take_gradient, jit)
        self._step = self._compile(self._take_step, jit)
        self._test = self._compile(lambda data: _nothing(self.model.test_step(data)), jit)
        self._apply = self._compile(self._apply_gradient)
        self._read = self._compile(lambda: self._packed(self._trainable))
        self._write = self._compile(self._assign)

    def _compile(self, function: Any, jit: bool | None = None) -> Any:
        if self.model.run_eagerly:
            return lambda *arguments: function(*_tensors(arguments))
        return Compiled(function, jit)

    def _take_gradient(self, data: Any) -> Any:
        assert self._capture is not None  # noqa: S101 - joint replicas have one
        real, self.model.optimizer = self.model.optimizer, self._capture
        try:
            self.model.train_step(data)
        finally:
            self.model.optimizer = real
        return self._packed(self._capture.gradients)

    def _packed(self, vectors: list[Any]) -> Any:
        """Return vectors, statistics and the loss metric's sums as one tensor: one copy to NumPy."""
        return tf.concat([_flat(part) for part in (*vectors, *self._statistics, *self._loss())], axis=0)

    def _loss(self) -> tuple[Any, Any]:
        loss = next((metric for metric in self.model.metrics if metric.name == "loss"), None)
        if not isinstance(loss, keras.metrics.Mean):
            return tf.zeros([]), tf.zeros([])
        return loss.total, loss.count

    def _apply_gradient(self, gradient: Any, statistics: Any) -> None:
        gradients = [tf.cast(part, v.dtype) for v, part in _cut(gradient, self._trainable)]
        self.model.optimizer.apply(gradients, self.model.trainable_variables)
        self._set(statistics, self._statistics)

    def _apply_and_take_gradient(self, gradient: Any, statistics: Any, data: Any) -> Any:
        self._apply_gradient(gradient, statistics)
        return self._take_gradient(data)

    def _take_step(self, parameters: Any, statistics: Any, data: Any, read: bool) -> Any:
        if parameters is not None:
            self._assign(parameters, statistics)
        self.model.train_step(data)
        return self._packed(self._trainable) if read else None

    def _assign(self, parameters: Any, statistics: Any) -> None:
        self._set(parameters, self._trainable)
        self._set(statistics, self._statistics)

    def _set(self, flat: Any, variables: list[Any]) -> None:
        if flat is not None:
            for variable, part in _cut(flat, variables):
                variable.assign(tf.cast(part, variable.dtype))

    def gradient(self, batch: Batch, last: Mean | None = None) -> Reading:
        """Apply the last mean gradient, if given, then return the gradient of the batch's loss."""
        if last is None:
            return self._reading(self._gradient(batch.to_tuple()))
        mean = last.gradient, _optional(last.statistics)
        return self._reading(self._apply_and_take(*mean, batch.to_tuple()))

    def apply(self, mean: Mean) -> None:
        """Take one optimizer step along a mean gradient, and set the statistics unless they are empty."""
        self._apply(mean.gradient, _optional(mean.statistics))

    def step(self, batch: Batch, center: Center | None = None, *, read: bool = False) -> Reading | None:
        """Go on from the center, if given, and train on a batch; return the outcome if asked to."""
        start = (None, None) if center is None else (center[0], _optional(center[1]))
        outcome = self._step(*start, batch.to_tuple(), read)
        return self._reading(outcome) if read else None

    def test(self, batch: Batch) -> None:
        """Let the metrics take in a batch without training on it."""
        self._test(batch.to_tuple())

    def read(self) -> Reading:
        """Return the trainable variables."""
        return self._reading(self._read())

    def write(self, center: Center) -> None:
        """Set the trainable variables, and the statistics unless they are empty."""
        self._write(center.parameters, _optional(center.statistics))

    def _reading(self, packed: Any) -> Reading:
        values = np.asarray(packed)  # where it lies; packed.numpy() would be a copy
        total, count = values[-2:].tolist()
        return Reading(values[: self._size], values[self._size : -2], (total, count))


def _nothing(logs: Any) -> None:
    """Drop what a step returns, so that the graph does not compute it."""


def _optional(vector: Vector) -> Vector | None:
    return vector if len(vector) else None


def _flat(value: Any) -> Any:
    return tf.cast(tf.reshape(tf.convert_to_tensor(value), [-1]), tf.float32)


def _cut(flat: Any, variables: list[Any]) -> list[tuple[Any, Any]]:
    """Return each variable with its part of a flat vector, in its shape."""
    parts = tf.split(flat, [int(np.prod(variable.shape, dtype=int)) for variable in variables])
    return [(v, tf.reshape(part, v.shape)) for v, part in zip(variables, parts, strict=True)]


def set_threads(count: int) -> None:
    """Bound the threads of TensorFlow's operations, in a process that has not used it yet."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)
    except RuntimeError:
        return  # A reused process keeps the threads that it began with.
