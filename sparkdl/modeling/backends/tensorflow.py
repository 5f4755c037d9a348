"""Keras on TensorFlow: a compiled function for each operation of the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from sparkdl.core.sparse_gradients import Table, decode, densified
from sparkdl.core.tree import split
from sparkdl.core.vectors import ALIGNMENT, Array, Vector, address
from sparkdl.data.batch import Batch
from sparkdl.errors import ModelError
from sparkdl.modeling import (
    execution,
    keras_internals,
    keras_metrics,
    keras_settings,
    losses,
    optimizers,
    serialization,
    signature,
)
from sparkdl.modeling.backends.base import Reading, RoundMeans
from sparkdl.modeling.backends.common import Capture
from sparkdl.modeling.backends.stateful import StatefulReplica
from sparkdl.modeling.keras_variables import undisturbed

logger = logging.getLogger(__name__)


class Compiled:
    """A compiled function that finds its traces by the shapes of its arguments.

    ``tf.function`` takes longer to find a trace and to call it than a small step takes to run.

    Args:
        function: the function to compile. It receives tensors in place of arrays, and other arguments
            unchanged. It returns float32 tensors or None.
        jit: whether XLA compiles it; None is TensorFlow's default.
        sized: whether to trace it for the exact number of rows, because a layer relies on a fixed batch size.
    """

    def __init__(self, function: Callable[..., Any], jit: bool | None, *, sized: bool = False) -> None:
        self._function = tf.function(function, jit_compile=jit, autograph=False)
        self._traces: dict[Any, Any] = {}
        self._jit, self._sized = jit, sized

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with structures of arrays, None or bools, and return a list of its results."""
        parts, form = split(arguments)  # in the order of tf.nest
        tensors = [_tensor(part) for part in parts if isinstance(part, np.ndarray)]
        kind = form, *map(_kind, parts)
        if kind not in self._traces:
            trace = self._function.get_concrete_function(*_specs(arguments, sized=self._sized))
            self._traces[kind] = trace, trace.captured_inputs, [tf.float32] * len(trace.outputs)
        trace, captured, kinds = self._traces[kind]
        if self._jit or any(tensor.dtype == tf.string for tensor in tensors):
            return keras_internals.call_flat(trace, tensors, captured)
        return tf.raw_ops.StatefulPartitionedCall(args=[*tensors, *captured], Tout=kinds, f=trace)


def _tensors(arguments: tuple[Any, ...]) -> Any:
    """Return the arguments with a tensor in place of each array."""
    return tf.nest.map_structure(
        lambda part: _tensor(part) if isinstance(part, np.ndarray) else part, arguments
    )


def _specs(arguments: tuple[Any, ...], *, sized: bool) -> Any:
    """Return the arguments with a TensorSpec in place of each array.

    Unless ``sized``, the specs accept any number of rows.
    """

    def spec(part: Any) -> Any:
        return tf.TensorSpec([None, *part.shape[1:]] if part.ndim and not sized else part.shape, part.dtype)

    return tf.nest.map_structure(lambda part: spec(part) if isinstance(part, np.ndarray) else part, arguments)


def _kind(part: Any) -> Any:
    """Return the properties of an array that decide which trace is used; return other values unchanged."""
    return (part.shape[1:], part.ndim, part.dtype) if isinstance(part, np.ndarray) else part


def _tensor(array: Array) -> Any:
    """Return an array as a tensor, without a copy if TensorFlow can share the array's memory."""
    flags = array.flags
    if (
        flags.c_contiguous
        and flags.writeable
        and array.size
        and array.dtype.kind in "fiu"
        and not address(array) % ALIGNMENT
    ):
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


class TensorFlowReplica(StatefulReplica):
    """A replica on TensorFlow.

    As in Keras's own steps, the gradient of a variable in which a batch looks up rows is IndexedSlices. If
    workers exchange gradients, it is made dense if the optimizer refuses slices, or if the slices cannot be
    exchanged, for example because they are too large.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        super().__init__(model, joint=joint)
        use_adam_kernel(optimizers.inner(model))
        sizes = [int(np.prod(shape, dtype=int)) for shape in self._shapes]
        self._size, self._has_warned = sum(sizes), False
        self._tables = tuple(
            Table(size, shape[0] if shape else 0) for size, shape in zip(sizes, self._shapes, strict=True)
        )

    def compiled(self, function: Callable[..., Any], what: str = "") -> Callable[..., Any]:
        """Return a version of a function that takes arrays, compiled unless the model runs eagerly.

        ``what`` is "train" or "test" if the function runs a training or test step, else empty.
        """
        if self.model.run_eagerly:
            return lambda *arguments: function(*_tensors(arguments))
        sized = signature.fixed_batch_size(self.model) is not None
        return Compiled(function, bool(self.model.jit_compile) if what else None, sized=sized)

    def catch_up(self) -> None:
        """Do nothing: this replica defers no work."""

    def _packed(self, vectors: Sequence[Any], denominator: Any = None, since: Any = None) -> Any:
        """Return vectors minus ``since`` as one tensor, and statistics and scalars as another.

        A third tensor is returned only if the first one contains slices.
        """
        sliced = any(isinstance(vector, tf.IndexedSlices) for vector in vectors)
        if not sliced or optimizers.refuses_slices(self._model):
            return super()._packed(vectors, denominator, since)
        return self._encoded(vectors), self._rest(denominator), tf.constant(1.0)

    def _encoded(self, vectors: Sequence[Any]) -> Any:
        """Return gradients, some with slices, as one tensor, encoded as in ``core.sparse_gradients``."""
        pairs = list(zip(vectors, self._shapes, strict=True))
        dense = [pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]
        sliced = [index for index, vector in enumerate(vectors) if isinstance(vector, tf.IndexedSlices)]
        rows = [tf.cast(vectors[index].indices, tf.int32) for index in sliced]
        directory = [number for pair in zip(sliced, map(tf.size, rows), strict=True) for number in pair]
        words = tf.concat([*rows, tf.stack([*directory, len(sliced)])], axis=0)
        parts = [self.pack(*zip(*dense, strict=True))] if dense else []
        parts += [tf.cast(tf.reshape(vectors[index].values, [-1]), tf.float32) for index in sliced]
        return tf.concat([*parts, tf.bitcast(words, tf.float32)], axis=0)

    def _reading(self, packed: Sequence[Any]) -> Reading:
        reading = super()._reading(packed)
        if len(packed) == 2:
            return reading
        adds, most = optimizers.adds_slices(self._model), self.slices or 0
        if len(reading.vector) <= (min(most, self._size) if adds else most):
            return reading._replace(sliced=True)
        if self.slices is None and not adds:
            raise cannot_average(self._model)
        if most and not adds and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The sparse gradients of embeddings take %d MiB per batch, more than workers exchange as "
                "slices. The slices of each row are summed first, so the steps of an adaptive optimizer "
                "differ from those of model.fit. Use a smaller batch_size.",
                reading.vector.nbytes >> 20,
            )
        return reading._replace(vector=densified(decode(reading.vector, self._tables), self._tables).rest)

    def given(self, mean: RoundMeans) -> Any:
        """Return a mean gradient in the form that the compiled functions take, with its slices separated."""
        if not mean.sliced:
            return mean.gradient
        slices = decode(mean.gradient, self._tables)
        return slices.rest, tuple([slices.lookups.get(index) for index in range(len(self._tables))])

    def gradients(self, given: Any) -> list[Any]:
        """Return each trainable variable's gradient from the result of ``given``."""
        if not isinstance(given, tuple):
            return super().gradients(given)
        rest, lookups = given
        pairs = list(zip(self._trainable, lookups, strict=True))
        dense = iter(self.split(rest, [variable for variable, lookup in pairs if lookup is None]))
        return [next(dense) if lookup is None else _slices(variable, *lookup) for variable, lookup in pairs]

    def pack(self, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return tensors as one flat float32 tensor. None stands for zeros."""
        # IndexedSlices that are not sent as slices become dense here: convert_to_tensor sums them by row.
        dense = (
            tf.zeros(shape) if part is None else tf.convert_to_tensor(part)
            for part, shape in zip(parts, shapes, strict=True)
        )
        return tf.concat([tf.cast(tf.reshape(part, [-1]), tf.float32) for part in dense], axis=0)

    def split(self, flat: Any, variables: Sequence[Any]) -> list[Any]:
        """Return each variable's part of a flat tensor, in its shape and dtype."""
        if not variables:
            return []
        parts = tf.split(flat, [int(np.prod(variable.shape, dtype=int)) for variable in variables])
        return [
            tf.cast(tf.reshape(part, variable.shape), variable.dtype)
            for variable, part in zip(variables, parts, strict=True)
        ]

    def array(self, packed: Any) -> Vector:
        """Return a flat tensor as an array. Unlike packed.numpy(), this does not copy host memory."""
        return np.asarray(packed)


def cannot_average(model: keras.Model) -> ModelError:
    """Return the error for sparse gradients that workers would have to average among themselves."""
    return ModelError(
        "Workers cannot average the sparse gradients of embeddings among themselves: the steps of "
        f"{type(optimizers.inner(model)).__name__} would differ from those of model.fit. Set "
        'placement="driver", or frequency to a number of batches or "epoch".'
    )


def has_slices(model: keras.Model, row: Sequence[Any], builder: Any = None, objects: Any = None) -> bool:
    """Return True if the gradient of a model on some rows has slices, as that of an embedding has.

    Also False if the model fails on the rows.

    Args:
        model: a compiled and built model.
        row: x, y and weights of some rows.
        builder: the function that built the model, if any.
        objects: custom objects that the model needs.
    """
    try:
        if losses.is_own(model, "train_step"):
            gradients = _gradients_of_step(model, row, builder, objects)
        else:
            gradients = _gradients_of_loss(model, *row)
    except Exception:  # the user's model or step may raise anything on a few rows
        logger.debug("The gradients of the first row are unknown.", exc_info=True)
        return False
    return any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)


def _gradients_of_loss(model: keras.Model, x: Any, y: Any, weights: Any) -> list[Any]:
    """Return the gradients of the loss that Keras computes, by trainable variable."""
    with undisturbed(model), tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weights)
    return list(tape.gradient(loss, [variable.value for variable in model.trainable_variables]))


def _gradients_of_step(model: keras.Model, row: Sequence[Any], builder: Any, objects: Any) -> list[Any]:
    """Return the gradients that the user's training step applies, from a copy of the model."""
    with keras_settings.alone():
        copy = serialization.copy_of(model, objects) if builder is None else builder()
        keras_metrics.build_metrics(copy, *row, step="train_step")
        capture = Capture(copy)
        with capture.in_place():
            execution.take_step(copy, "train_step", Batch(*row).to_data())
    return capture.gradients


def _slices(variable: Any, rows: Any, values: Any) -> tf.IndexedSlices:
    """Return the slices of a variable's gradient."""
    values = tf.cast(tf.reshape(values, [-1, *variable.shape[1:]]), variable.dtype)
    return tf.IndexedSlices(values, rows, tf.constant(list(variable.shape), tf.int32))


def use_adam_kernel(optimizer: keras.optimizers.Optimizer) -> None:
    """Take Adam's steps with TensorFlow's own kernel: one operation per variable instead of a dozen.

    It computes the same as Keras (Kingma and Ba, 2014, with the epsilon of section 2). Keras still does the
    work around the step, such as clipping and weight decay. Keras's own step is kept for AMSGrad and for
    gradients with slices. Other optimizers stay unchanged.

    Args:
        optimizer: the optimizer of a worker's replica.
    """
    keras_step = optimizer.update_step
    if getattr(type(optimizer), "update_step", None) is not keras.optimizers.Adam.update_step:
        return

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if optimizer.amsgrad or isinstance(gradient, tf.IndexedSlices):
            keras_step(gradient, variable, learning_rate)
            return
        rate, first, second, epsilon = (
            tf.cast(value, variable.dtype)
            for value in (learning_rate, optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
        )
        step = tf.cast(optimizer.iterations + 1, variable.dtype)
        moments = keras_internals.adam_moments(optimizer, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=moments[0].value.handle,
            v=moments[1].value.handle,
            beta1_power=first**step,
            beta2_power=second**step,
            lr=rate,
            beta1=first,
            beta2=second,
            epsilon=epsilon,
            grad=tf.cast(gradient, variable.dtype),
        )

    optimizer.update_step = update_step


def set_threads(count: int) -> None:
    """Limit the threads of TensorFlow's operations, in a process that has not used it yet."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)
    except RuntimeError:
        return  # A reused process keeps its first limits.


def has_gpu() -> bool:
    """Return True if TensorFlow computes on a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))
