"""Shared parts of the backends, above all an optimizer that keeps gradients.

If workers exchange gradients, the model's ``train_step``, Keras's or the user's, computes the gradient of a
batch. While that step is traced or runs, the model's optimizer is replaced by one that keeps the gradients
instead of applying them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from sparkdl.core.vectors import Vector
from sparkdl.errors import ModelError
from sparkdl.modeling.backends.base import Reading

SCALARS = 3  # numbers after the statistics: the loss metric's total and count, and a denominator


class Capture(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that keeps the gradients of one step instead of applying them.

    Args:
        model: the model. If its real optimizer scales the loss, it still does.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(learning_rate=0.0)
        self.model, self.real = model, model.optimizer
        self.places = [id(variable) for variable in model.trainable_variables]
        # ``apply_real`` skips variables whose gradient was None in the worker's last step. Before the first
        # step, and always on a worker without rows, these variables are unknown, and none is skipped.
        self.gradients: list[Any] = [0.0] * len(self.places)
        self.taken = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's optimizer for one step.

        Raises:
            ModelError: the step did not apply gradients with ``model.optimizer``.
        """
        self.gradients, self.taken = [None] * len(self.places), False
        self.model.optimizer = self
        try:
            yield
        finally:
            self.model.optimizer = self.real
        if not self.taken:
            raise ModelError(
                "train_step should apply gradients with model.optimizer, since workers exchange these "
                'gradients for every batch; got none. Set frequency to a number of batches or to "epoch".'
            )

    @property
    def variables(self) -> list[Any]:
        """The real optimizer's variables, which may include a loss scale."""
        return list(self.real.variables)

    @property
    def iterations(self) -> Any:
        """The real optimizer's step count, on which a loss may depend."""
        return self.real.iterations

    @property
    def learning_rate(self) -> Any:
        """The real optimizer's learning rate."""
        return self.real.learning_rate

    def apply_real(self, gradients: Sequence[Any]) -> None:
        """Apply gradients with the real optimizer. As in Keras, skip variables without a gradient."""
        present = [None if kept is None else one for kept, one in zip(self.gradients, gradients, strict=True)]
        self.real.apply(present, self.model.trainable_variables)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the real optimizer does."""
        return self.real.scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients. None stands for a variable that the loss does not depend on.

        Raises:
            ModelError: the step already applied gradients.
        """
        self._take()
        self.gradients = list(grads)
        if trainable_variables is not None:  # possibly only some variables, in a different order
            moved = dict(zip(map(id, trainable_variables), self.gradients, strict=True))
            self.gradients = [moved.get(place) for place in self.places]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return the trainable variables, and the gradients in place of the optimizer's variables.

        Raises:
            ModelError: the step already applied gradients.
        """
        self._take()
        return trainable_variables, grads

    def _take(self) -> None:
        if self.taken:
            raise ModelError(
                "train_step should apply gradients once, since workers exchange gradients once per batch; "
                'it applied them several times. Set frequency to a number of batches or to "epoch".'
            )
        self.taken = True


def reading(vector: Vector, rest: Vector) -> Reading:
    """Return the Reading of a vector and of ``rest``: the statistics followed by the scalars."""
    total, count, denominator = rest[-SCALARS:].tolist()
    return Reading(vector, rest[:-SCALARS], (total, count), denominator)


def optional(vector: Vector) -> Vector | None:
    """Return a vector, or None if it is empty."""
    return vector if len(vector) else None


def loss_metric(model: keras.Model) -> keras.metrics.Mean | None:
    """Return Keras's own loss metric of a model; None if the model has none."""
    loss = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return loss if isinstance(loss, keras.metrics.Mean) else None


def first_rows(part: Any) -> Any:
    """Return the first row of an array, or of each array in a structure; None for None."""
    return None if part is None else keras.tree.map_structure(lambda array: array[:1], part)
