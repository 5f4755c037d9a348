"""The trainable variables of a model in a fit.

Keras reads the ``trainable`` flags at different times on different backends. A fit on Spark does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from sparkdl.errors import ModelError
from sparkdl.modeling import keras_internals, optimizers
from sparkdl.modeling.keras_internals import own_trainable
from sparkdl.modeling.keras_variables import trainable
from sparkdl.process import interrupts


class Trainability:
    """The ``trainable`` flags of a model's layers and variables at one point in time.

    Plain Keras reads the flags when it traces the first step after ``compile`` (TensorFlow), or at each step
    (torch). On JAX an optimizer accepts only the variables that it was built for.

    Args:
        model: the model.

    Attributes:
        traced: whether Keras ignores changes of the flags until the model is compiled again.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model, self.traced = model, False
        # a new object each time the model is compiled
        self.compiled = keras_internals.compiled_part(model, "loss")
        self.layers = [(layer, own_trainable(layer)) for layer in keras_internals.flat_layers(model)]
        self.weights = [(weight, weight.trainable) for weight in model.weights]
        fitted = vars(model).get("train_function") is not None and model.optimizer.built
        if fitted and keras.backend.backend() == "tensorflow":
            self.traced = True
            moved = set(map(id, optimizers.moves(model)))
            self.weights = [(weight, id(weight) in moved) for weight, _ in self.weights]
            self.layers = [
                (layer, trainable or any(id(weight) in moved for weight in layer.weights))
                for layer, trainable in self.layers
            ]

    def changed(self) -> list[str]:
        """Return the names of the layers, or else the variables, whose flag has changed."""
        layers = [f'layer "{layer.name}"' for layer, was in self.layers if own_trainable(layer) != was]
        return layers or [f'variable "{one.path}"' for one, was in self.weights if one.trainable != was]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these flags to the model in a ``with`` block."""
        now = [own_trainable(layer) for layer, _ in self.layers], [one.trainable for one, _ in self.weights]
        try:
            self._set([was for _, was in self.layers], [was for _, was in self.weights])
            yield
        finally:
            with interrupts.held():
                self._set(*now)

    def _set(self, layers: Sequence[bool], weights: Sequence[bool]) -> None:
        for (layer, _), value in zip(self.layers, layers, strict=True):
            keras_internals.set_own_trainable(layer, value)
        for (weight, _), value in zip(self.weights, weights, strict=True):
            if weight.trainable != value:
                weight.trainable = value

    def still(self) -> Trainability:
        """Return the flags for the next fit. TensorFlow keeps these until the model is compiled again."""
        same = keras_internals.compiled_part(self.model, "loss") is self.compiled
        same = same and len(self.weights) == len(self.model.weights)
        return self if same and keras.backend.backend() == "tensorflow" else Trainability(self.model)

    def trace(self) -> None:
        """Ignore changes until the next ``compile``, if Keras does so on this backend."""
        self.traced = keras.backend.backend() == "tensorflow"

    def require_kept(self) -> None:
        """Raise an error if a callback made a change that plain Keras would follow.

        Raises:
            ModelError: a callback compiled the model, or changed a flag. In the latter case, the message
                names the layer or variable.
        """
        if keras_internals.compiled_part(self.model, "loss") is not self.compiled:
            raise ModelError(
                f'A callback compiled the model "{self.model.name}" while fit was running. Compile the '
                "model before fit."
            )
        changed = [] if self.traced else self.changed()
        if changed:
            raise ModelError(
                f"A callback changed trainable of the {changed[0]}, but workers use the value from the "
                "start of fit. Set trainable before fit, and compile the model again."
            )


def require_known(model: keras.Model) -> None:
    """Raise an error if the optimizer does not fit the trainable variables, as Keras does at the first step.

    Raises:
        ModelError: the optimizer was built for other variables.
    """
    known, wanted = optimizers.moves(model), trainable(model)
    others = [variable.path for variable in wanted if id(variable) not in set(map(id, known))]
    exact = keras.backend.backend() == "jax" and len(known) != len(wanted)
    if others or exact:
        raise ModelError(
            f'The optimizer of the model "{model.name}" was built for variables other than those that are '
            f"trainable now{': ' + others[0] if others else ''}. Compile the model with a new optimizer."
        )


def require_trainable(model: keras.Model) -> None:
    """Raise an error if a built model has nothing to train.

    Raises:
        ModelError: all variables of the model are frozen.
    """
    if model.built and not model.trainable_variables:
        raise ModelError(
            f'The model "{model.name}" has no trainable variables, so fit has nothing to train. Set '
            "trainable = True on a layer and compile the model again."
        )
