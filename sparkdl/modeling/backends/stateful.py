"""Replicas on the backends whose variables hold their own values: TensorFlow and torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sparkdl.core.vectors import Vector
from sparkdl.data.batch import Batch
from sparkdl.modeling import keras_variables
from sparkdl.modeling.backends.base import Center, Reading, RoundMeans
from sparkdl.modeling.backends.common import SCALARS, Capture, loss_metric, optional, reading
from sparkdl.modeling.losses import watched


class StatefulReplica(ABC):
    """A replica whose operations are functions of arrays, each compiled if the backend compiles functions.

    Args:
        model: a compiled and built model.
        joint: True to return gradients and apply their means; False to take whole steps.
    """

    def __init__(self, model: keras.Model, *, joint: bool) -> None:
        self._model = model
        self._trainable = keras_variables.trainable(model)
        self._statistics = keras_variables.statistics(model)
        self.slices: int | None = 0
        self.exact = all(variable.dtype == "float32" for variable in self._trainable)
        shapes = [tuple(variable.shape) for variable in (*self._trainable, *self._statistics)]
        self._shapes = shapes[: len(self._trainable)]
        self._other_shapes = [*shapes[len(self._trainable) :], *[()] * SCALARS]
        self._capture = Capture(model) if joint else None
        self._gradient = self.compiled(self._take_gradient, "train")
        self._apply_and_take = self.compiled(self._apply_and_take_gradient, "train")
        self._step = self.compiled(self._take_step, "train")
        self._test = self.compiled(lambda data: _nothing(self._model.test_step(data)), "test")
        self._apply = self.compiled(self._apply_gradient)
        self._read = self.compiled(lambda: self._packed(self._trainable))
        self._write = self.compiled(self._assign)

    @property
    def model(self) -> keras.Model:
        """The model. Its variables are up to date until the replica's next operation."""
        return self._model

    # The methods that differ between backends.

    @abstractmethod
    def compiled(self, function: Callable[..., Any], what: str = "") -> Callable[..., Any]:
        """Return a version of a function that takes arrays, compiled if the backend compiles.

        ``what`` is "train" or "test" if the function runs a training or test step, else empty.
        """

    @abstractmethod
    def catch_up(self) -> None:
        """Do deferred work now."""

    @abstractmethod
    def pack(self, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return tensors as one flat float32 tensor. None stands for zeros."""

    @abstractmethod
    def split(self, flat: Any, variables: Sequence[Any]) -> list[Any]:
        """Return each variable's part of a flat tensor, in its shape and dtype."""

    @abstractmethod
    def array(self, packed: Any) -> Vector:
        """Return a flat tensor as an array."""

    def loss_sums(self, loss: keras.metrics.Mean) -> list[Any]:
        """Return the sums of losses and of weights that the loss metric has accumulated."""
        return [loss.total, loss.count]

    def given(self, mean: RoundMeans) -> Any:
        """Return a mean gradient in the form that the compiled functions take."""
        return mean.gradient

    def gradients(self, given: Any) -> list[Any]:
        """Return each trainable variable's gradient from the result of ``given``."""
        return self.split(given, self._trainable)

    def difference(self, vectors: Sequence[Any], since: Any) -> Any:
        """Return vectors as one flat tensor, minus ``since`` if it is given."""
        flat = self.pack(vectors, self._shapes)
        return flat if since is None else flat - since

    # The computations, on the backend's tensors.

    def _take_gradient(self, scale: Any, data: Any) -> Any:
        assert self._capture is not None  # noqa: S101 - joint replicas have a Capture
        with self._capture.in_place(), watched(scale) as watch:
            self._model.train_step(data)
        return self._packed(self._capture.gradients, watch.denominator())

    def _packed(self, vectors: Sequence[Any], denominator: Any = None, since: Any = None) -> tuple[Any, Any]:
        """Return vectors minus ``since`` as one tensor, and statistics and scalars as another."""
        return self.difference(vectors, since), self._rest(denominator)

    def _rest(self, denominator: Any) -> Any:
        """Return statistics and scalars as one tensor."""
        loss = loss_metric(self._model)
        sums = [None, None] if loss is None else self.loss_sums(loss)
        return self.pack([*self._statistics, *sums, denominator], self._other_shapes)

    def _apply_gradient(self, gradient: Any, statistics: Any) -> None:
        assert self._capture is not None  # noqa: S101 - joint replicas have a Capture
        self._capture.apply_real(self.gradients(gradient))
        self._set(statistics, self._statistics)

    def _apply_and_take_gradient(self, gradient: Any, statistics: Any, scale: Any, data: Any) -> Any:
        self._apply_gradient(gradient, statistics)
        return self._take_gradient(scale, data)

    def _take_step(self, parameters: Any, statistics: Any, data: Any, since: Any, read: bool) -> Any:
        if parameters is not None:
            self._assign(parameters, statistics)
        self._model.train_step(data)
        if not read:
            return None
        return self._packed(self._trainable, since=parameters if since is None else since)

    def _assign(self, parameters: Any, statistics: Any) -> None:
        self._set(parameters, self._trainable)
        self._set(statistics, self._statistics)

    def _set(self, flat: Any, variables: list[Any]) -> None:
        if flat is not None:
            for variable, part in zip(variables, self.split(flat, variables), strict=True):
                variable.assign(part)

    # The methods that the loop calls, on arrays.

    def gradient(self, batch: Batch, last: RoundMeans | None = None, scale: float | None = None) -> Reading:
        """Apply the last mean gradient, if given, then return the gradient of the batch's loss."""
        data = None if scale is None else np.array(scale, np.float32), batch.to_data()
        if last is None:
            return self._reading(self._gradient(*data))
        return self._reading(self._apply_and_take(self.given(last), optional(last.statistics), *data))

    def apply(self, mean: RoundMeans) -> None:
        """Take one optimizer step along a mean gradient, and set the statistics unless they are empty."""
        self._apply(self.given(mean), optional(mean.statistics))

    def step(self, batch: Batch, center: Center | None = None, since: Vector | None = None) -> Reading | None:
        """Set the center, if given, and train on a batch; return the change from ``since``, if given."""
        parameters, statistics = (None, None) if center is None else (center[0], optional(center[1]))
        other = None if since is parameters else since
        outcome = self._step(parameters, statistics, batch.to_data(), other, since is not None)
        return None if since is None else self._reading(outcome)

    def test(self, batch: Batch) -> None:
        """Update the metrics with a batch, without training on it."""
        self._test(batch.to_data())

    def loss(self) -> tuple[float, float]:
        """Return the sums of losses and of weights that the loss metric has accumulated."""
        metric = loss_metric(self._model)
        if metric is None:
            return 0.0, 0.0
        total, count = map(keras.ops.convert_to_numpy, self.loss_sums(metric))
        return float(total), float(count)

    def read(self) -> Reading:
        """Return the trainable variables, the statistics and the loss sums."""
        return self._reading(self._read())

    def write(self, center: Center) -> None:
        """Set the trainable variables, and the statistics unless they are empty."""
        self._write(center.parameters, optional(center.statistics))

    def _reading(self, packed: Sequence[Any]) -> Reading:
        return reading(self.array(packed[0]), self.array(packed[1]))


def _nothing(logs: Any) -> None:
    """Discard the logs of a step, so that a graph does not compute them."""
