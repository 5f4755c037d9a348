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
from sparkdl.backends.base import Batch
from sparkdl.weights import EMPTY, Vector


class Capture(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that keeps the gradients of one step, flat and dense, instead of applying them.

    Args:
        optimizer: the real optimizer, which scales the loss where it must.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.real = optimizer
        self.gradient: Any = None

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the real optimizer does."""
        return self.real.scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients as one flat tensor; a variable that got none has a gradient of zeros."""
        # An embedding's gradient is IndexedSlices, which convert_to_tensor adds up.
        self.gradient = tf.concat(
            [
                tf.zeros([np.prod(variable.shape, dtype=int)])
                if gradient is None
                else tf.cast(tf.reshape(tf.convert_to_tensor(gradient), [-1]), tf.float32)
                for gradient, variable in zip(grads, trainable_variables, strict=True)
            ],
            axis=0,
        )


class TensorFlowReplica:
    """A replica whose every move is one call of a compiled function.

    Args:
        model: a compiled and built model.
        joint: whether gradients are taken and applied apart, or steps taken whole.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        self.model = model
        self._trainable = [variable.value for variable in models.trainable(model)]
        self._statistics = [variable.value for variable in models.statistics(model)]
        self._capture = Capture(model.optimizer) if joint else None
        compiled = not model.run_eagerly
        self._gradient = self._compile(self._take_gradient, compiled, jit=True)
        self._apply = self._compile(self._apply_gradient, compiled)
        self._step = self._compile(lambda data: self._train(data), compiled, jit=True)
        self._test = self._compile(lambda data: self._evaluate(data), compiled, jit=True)
        self._read = {
            id(part): tf.function(lambda part=part: _concat(part))
            for part in (self._trainable, self._statistics)
        }
        self._write = {
            id(part): tf.function(
                lambda flat, part=part: _assign(part, flat), input_signature=[tf.TensorSpec([None])]
            )
            for part in (self._trainable, self._statistics)
        }
        self._sums = tf.function(self._loss_sums)

    def _compile(self, function: Any, compiled: bool, jit: bool = False) -> Any:
        if not compiled:
            return function
        jit_compile = bool(self.model.jit_compile) if jit else None
        return tf.function(function, jit_compile=jit_compile, reduce_retracing=True)

    def _take_gradient(self, data: Any) -> Any:
        assert self._capture is not None  # noqa: S101 - joint replicas have one
        real, self.model.optimizer = self.model.optimizer, self._capture
        try:
            self.model.train_step(data)
        finally:
            self.model.optimizer = real
        return self._capture.gradient

    def _apply_gradient(self, flat: Any) -> None:
        parts = tf.split(flat, [int(np.prod(v.shape, dtype=int)) for v in self._trainable])
        gradients = [tf.reshape(p, v.shape) for p, v in zip(parts, self._trainable, strict=True)]
        self.model.optimizer.apply(
            [tf.cast(g, v.dtype) for g, v in zip(gradients, self._trainable, strict=True)],
            self.model.trainable_variables,
        )

    def _train(self, data: Any) -> None:
        self.model.train_step(data)

    def _evaluate(self, data: Any) -> None:
        self.model.test_step(data)

    def _loss_sums(self) -> Any:
        loss = next((metric for metric in self.model.metrics if metric.name == "loss"), None)
        if not isinstance(loss, keras.metrics.Mean):
            return tf.zeros(2)
        return tf.stack([tf.cast(loss.total.value, tf.float32), tf.cast(loss.count.value, tf.float32)])

    def gradient(self, batch: Batch) -> Vector:
        """Return the gradient of the batch's loss, shape (trainable,); metrics take the batch in."""
        return self._gradient(_tensors(batch)).numpy()  # type: ignore[no-any-return]

    def apply(self, gradient: Vector) -> None:
        """Take one optimizer step along a gradient."""
        self._apply(tf.constant(gradient))

    def step(self, batch: Batch) -> None:
        """Train on a batch with the replica's own optimizer; metrics take the batch in."""
        self._step(_tensors(batch))

    def test(self, batch: Batch) -> None:
        """Let the metrics take in a batch without training on it."""
        self._test(_tensors(batch))

    def parameters(self) -> Vector:
        """Return the trainable variables."""
        return self._flat(self._trainable)

    def set_parameters(self, parameters: Vector) -> None:
        """Set the trainable variables."""
        self._write[id(self._trainable)](tf.constant(parameters))

    def statistics(self) -> Vector:
        """Return the moving statistics."""
        return self._flat(self._statistics)

    def set_statistics(self, statistics: Vector) -> None:
        """Set the moving statistics."""
        if self._statistics:
            self._write[id(self._statistics)](tf.constant(statistics))

    def loss_sums(self) -> tuple[float, float]:
        """Return the sum of losses and of weights that the loss metric has taken in."""
        total, count = self._sums().numpy().tolist()
        return total, count

    def _flat(self, part: list[Any]) -> Vector:
        return self._read[id(part)]().numpy() if part else EMPTY


def _tensors(batch: Batch) -> Any:
    return tuple(tf.constant(part) for part in batch.to_tuple())


def _concat(variables: list[Any]) -> Any:
    return tf.concat([tf.cast(tf.reshape(v, [-1]), tf.float32) for v in variables], axis=0)


def _assign(variables: list[Any], flat: Any) -> None:
    parts = tf.split(flat, [int(np.prod(v.shape, dtype=int)) for v in variables])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def set_threads(count: int) -> None:
    """Bound the threads of TensorFlow's operations, in a process that has not used it yet."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)
    except RuntimeError:
        return  # A reused process keeps the threads that it began with.
