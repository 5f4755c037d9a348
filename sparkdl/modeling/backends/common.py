"""What the backends share, above all an optimizer that keeps gradients.

The gradient of a batch is taken by the model's own ``train_step``, whoever wrote it: while it is traced,
or runs, the optimizer is one that keeps the gradients instead of applying them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from sparkdl.core.vectors import Vector
from sparkdl.errors import ModelError
from sparkdl.modeling.backends.base import Reading

SCALARS = 3  # at the end of what is read: the loss metric's total and count, and a denominator


class Capture(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that keeps the gradients of one step instead of applying them.

    Args:
        model: the model, whose real optimizer scales the loss where it must.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(learning_rate=0.0)
        self.model, self.real = model, model.optimizer
        self.places = [id(variable) for variable in model.trainable_variables]
        # Before its first step a worker does not know what has no gradient; one without rows never does.
        self.gradients: list[Any] = [0.0] * len(self.places)
        self.taken = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in the place of the model's optimizer for one step.

        Raises:
            ModelError: the step has not applied gradients by it.
        """
        self.gradients, self.taken = [None] * len(self.places), False
        self.model.optimizer = self
        try:
            yield
        finally:
            self.model.optimizer = self.real
        if not self.taken:
            raise ModelError(
                "train_step does not apply gradients by model.optimizer, and workers that make each update "
                'together exchange those. Set frequency to a number of batches or to "epoch".'
            )

    @property
    def variables(self) -> list[Any]:
        """The real optimizer's variables, among which a loss scale may be."""
        return list(self.real.variables)

    @property
    def iterations(self) -> Any:
        """The real optimizer's count of steps, by which a loss may change."""
        return self.real.iterations

    @property
    def learning_rate(self) -> Any:
        """The real optimizer's learning rate."""
        return self.real.learning_rate

    def apply_real(self, gradients: Sequence[Any]) -> None:
        """Have the real optimizer apply gradients, but to what the step leaves without one, as Keras does."""
        present = [None if kept is None else one for kept, one in zip(self.gradients, gradients, strict=True)]
        self.real.apply(present, self.model.trainable_variables)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the real optimizer does."""
        return self.real.scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients; None stands for a variable that the loss does not move.

        Raises:
            ModelError: the step has applied others before.
        """
        self._take()
        self.gradients = list(grads)
        if trainable_variables is not None:  # some of them, maybe, in an order of their own
            moved = dict(zip(map(id, trainable_variables), self.gradients, strict=True))
            self.gradients = [moved.get(place) for place in self.places]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return the trainable variables, and the gradients in the place of the optimizer's variables.

        Raises:
            ModelError: the step has applied others before.
        """
        self._take()
        return trainable_variables, grads

    def _take(self) -> None:
        if self.taken:
            raise ModelError(
                "train_step applies gradients more than once, and workers that make each update together "
                'exchange them once a step. Set frequency to a number of batches or to "epoch".'
            )
        self.taken = True


def reading(vector: Vector, rest: Vector) -> Reading:
    """Return what was read at once: a vector, and statistics and then scalars."""
    total, count, denominator = rest[-SCALARS:].tolist()
    return Reading(vector, rest[:-SCALARS], (total, count), denominator)


def optional(vector: Vector) -> Vector | None:
    """Return a vector, or None for an empty one."""
    return vector if len(vector) else None


def loss_metric(model: keras.Model) -> keras.metrics.Mean | None:
    """Return the metric that takes in the loss, if the model has Keras's."""
    loss = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return loss if isinstance(loss, keras.metrics.Mean) else None


def first_rows(part: Any) -> Any:
    """Return the first row of an array, or of each array of a structure; None as it is."""
    return None if part is None else keras.tree.map_structure(lambda array: array[:1], part)
