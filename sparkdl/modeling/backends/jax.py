"""Keras on JAX: pure functions of all variables.

They are compiled, unless the model has ``run_eagerly=True`` or ``jit_compile=False``.

Between steps the replica holds the values of the variables. An access to ``model`` moves them into the
model's variables. The replica never keeps an array that it is given: its functions return new arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.data.batch import Batch
from sparkdl.modeling import keras_metrics, keras_variables, optimizers, signature
from sparkdl.modeling.backends.base import Center, Reading, RoundMeans
from sparkdl.modeling.backends.common import Capture, first_rows, loss_metric, optional, reading
from sparkdl.modeling.keras_internals import held_value, set_held_value
from sparkdl.modeling.losses import watched

Pair = tuple[Any, Any]  # a vector over the trainable variables, and the statistics or None
State = tuple[list[Any], list[Any], list[Any], list[Any]]  # trainable, other, optimizer, metric variables


class JaxReplica:
    """A replica on JAX.

    Args:
        model: a compiled and built model.
        joint: True to return gradients and apply their means; False to take whole steps.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        self._model = model
        self._held: State | None = None
        self._optimizer = model.optimizer
        optimizers.variables(model)
        places = {id(variable): index for index, variable in enumerate(model.non_trainable_variables)}
        self._statistics = [places[id(variable)] for variable in keras_variables.statistics(model)]
        self._capture = Capture(model) if joint else None
        self.slices: int | None = 0  # gradients are dense on JAX
        self.exact = all(variable.dtype == "float32" for variable in keras_variables.trainable(model))
        self._measured = False
        self._gradient = self._compiled(self._take_gradient)
        self._step = self._compiled(self._take_step, static_argnames="read")
        self._test = self._compiled(self._take_test)
        self._apply = self._compiled(self._apply_gradient)
        self._read = self._compiled(self._packed)
        self._write = self._compiled(self._assigned)

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self._model.run_eagerly or not self._model.jit_compile:
            return function
        return jax.jit(function, **options)  # type: ignore[no-any-return]

    @property
    def model(self) -> keras.Model:
        """The model, with up-to-date variables. Changes to them take effect at the next step."""
        if self._held is not None:
            for variables, values in zip(self._variables(), self._held, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            self._held = None
        return self._model

    def _variables(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        model = self._model
        return (
            list(model.trainable_variables),
            list(model.non_trainable_variables),
            list(self._optimizer.variables),
            list(model.metrics_variables),
        )

    def _state(self, batch: Batch | None = None) -> State:
        """Return the values of all variables. The first batch builds the metrics' variables."""
        if batch is not None and not self._measured:
            whole = signature.fixed_batch_size(self.model) is not None
            keras_metrics.build_metrics(self.model, *(part if whole else first_rows(part) for part in batch))
            self._measured = True
        if self._held is None:
            trainable, other, optimizer, metrics = self._variables()
            self._held = _values(trainable), _values(other), _values(optimizer), _values(metrics)
        return self._held

    # Pure functions of arrays.

    @contextmanager
    def _following(self, progress: Sequence[Any]) -> Iterator[None]:
        """Give a schedule's variables these traced values in a ``with`` block."""
        variables = optimizers.followed_variables(self._model)
        kept = list(map(held_value, variables))
        for variable, value in zip(variables, progress, strict=True):
            set_held_value(variable, value)
        try:
            yield
        finally:
            for variable, value in zip(variables, kept, strict=True):
                set_held_value(variable, value)

    def _progress(self) -> list[Any]:
        return [variable.value for variable in optimizers.followed_variables(self._model)]

    def _take_gradient(
        self, state: State, progress: Sequence[Any], mean: Pair | None, scale: Any, data: Any
    ) -> tuple[Any, State]:
        if mean is not None:
            state = self._apply_gradient(state, progress, mean)
        assert self._capture is not None  # noqa: S101 - joint replicas have a Capture
        with self._capture.in_place(), self._following(progress), watched(scale) as watch:
            _, (_, other, gradients, metrics) = self._model.train_step(state, data)
        after = state[0], other, state[2], metrics
        return self._packed(after, gradients, watch.denominator()), after

    def _apply_gradient(self, state: State, progress: Sequence[Any], mean: Pair) -> State:
        trainable, other, optimizer, metrics = state
        parts = self._cut(mean[0], trainable)
        with self._following(progress):
            trainable, optimizer = self._optimizer.stateless_apply(optimizer, parts, trainable)
        return trainable, self._with_statistics(other, mean[1]), optimizer, metrics

    def _take_step(
        self, state: State, progress: Sequence[Any], center: Pair | None, data: Any, since: Any, read: bool
    ) -> tuple[Any, State]:
        if center is not None:
            state = self._assigned(state, center)
        with self._following(progress):
            _, state = self._model.train_step(state, data)
        if center is not None and since is None:
            since = center[0]
        return self._packed(state, since=since) if read else None, state

    def _take_test(self, state: State, data: Any) -> State:
        trainable, other, optimizer, metrics = state
        _, (trainable, other, metrics) = self._model.test_step((trainable, other, metrics), data)
        return trainable, other, optimizer, metrics

    def _packed(
        self, state: State, vectors: Any = None, denominator: Any = None, since: Any = None
    ) -> tuple[Any, Any]:
        """Return vectors minus ``since`` as one array, and statistics and scalars as another."""
        trainable, other, _, metrics = state
        flat = _flat(trainable if vectors is None else vectors)
        rest = *(other[index] for index in self._statistics), *self._loss_sums(metrics)
        return (
            flat if since is None else flat - since,
            _flat([*rest, 0.0 if denominator is None else denominator]),
        )

    def _loss_sums(self, metrics: list[Any]) -> list[Any]:
        loss = loss_metric(self._model)
        if loss is None:
            return [0.0, 0.0]
        places = [id(variable) for variable in self._model.metrics_variables]
        return [metrics[places.index(id(variable))] for variable in (loss.total, loss.count)]

    def _assigned(self, state: State, center: Pair) -> State:
        trainable, other, optimizer, metrics = state
        parts = self._cut(center[0], trainable)
        return parts, self._with_statistics(other, center[1]), optimizer, metrics

    def _with_statistics(self, other: list[Any], flat: Any) -> list[Any]:
        if flat is None:
            return other
        parts = self._cut(flat, [other[index] for index in self._statistics])
        after = list(other)
        for index, part in zip(self._statistics, parts, strict=True):
            after[index] = part
        return after

    @staticmethod
    def _cut(flat: Any, like: Sequence[Any]) -> list[Any]:
        """Split a flat array into parts with the shapes and dtypes of some other arrays."""
        ends = np.cumsum([int(np.prod(array.shape, dtype=int)) for array in like])
        starts = [0, *ends[:-1]]
        return [
            jnp.reshape(flat[start:end], array.shape).astype(array.dtype)
            for start, end, array in zip(starts, ends, like, strict=True)
        ]

    # The methods that the loop calls.

    def gradient(self, batch: Batch, last: RoundMeans | None = None, scale: float | None = None) -> Reading:
        """Apply the last mean gradient, if given, then return the gradient of the batch's loss."""
        mean = None if last is None else (last.gradient, optional(last.statistics))
        factor = None if scale is None else np.array(scale, np.float32)
        packed, self._held = self._gradient(
            self._state(batch), self._progress(), mean, factor, _placed(batch.to_data())
        )
        return self._reading(packed)

    def apply(self, mean: RoundMeans) -> None:
        """Take one optimizer step along a mean gradient, and set the statistics unless they are empty."""
        parts = mean.gradient, optional(mean.statistics)
        self._held = self._apply(self._state(), self._progress(), parts)

    def step(self, batch: Batch, center: Center | None = None, since: Vector | None = None) -> Reading | None:
        """Set the center, if given, and train on a batch; return the change from ``since``, if given."""
        start = None if center is None else (center.parameters, optional(center.statistics))
        other = None if center is not None and since is center.parameters else since
        packed, self._held = self._step(
            self._state(batch),
            self._progress(),
            start,
            _placed(batch.to_data()),
            other,
            read=since is not None,
        )
        return None if since is None else self._reading(packed)

    def catch_up(self) -> None:
        """Do nothing: this replica defers no work."""

    def test(self, batch: Batch) -> None:
        """Update the metrics with a batch, without training on it."""
        self._held = self._test(self._state(batch), _placed(batch.to_data()))

    def loss(self) -> tuple[float, float]:
        """Return the sums of losses and of weights that the loss metric has accumulated."""
        total, count = self._loss_sums(self._state()[3])
        return float(total), float(count)

    def read(self) -> Reading:
        """Return the trainable variables, the statistics, and the sums of the loss metric."""
        return self._reading(self._read(self._state()))

    def write(self, center: Center) -> None:
        """Set the trainable variables, and the statistics unless they are empty."""
        self._held = self._write(self._state(), (center.parameters, optional(center.statistics)))

    @staticmethod
    def _reading(packed: tuple[Any, Any]) -> Reading:
        return reading(np.asarray(packed[0]), np.asarray(packed[1]))


def _flat(parts: Sequence[Any]) -> Any:
    return jnp.concatenate([jnp.reshape(part, -1).astype(jnp.float32) for part in parts])


def _values(variables: Sequence[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def _placed(data: Any) -> Any:
    """Return a batch spread over the devices of the current distribution, if there is one."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return data

    def place(array: Any) -> Any:
        if len(array) % distribution.num_model_replicas:
            return array  # a batch that cannot be divided: each device computes all of it
        return jax.device_put(array, distribution.get_data_layout(array.shape).backend_layout)

    return keras.tree.map_structure(place, data)


def has_gpu() -> bool:
    """Return True if JAX computes on a GPU."""
    return bool(jax.default_backend() == "gpu")
