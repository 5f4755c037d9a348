"""A model with a custom train_step or loss trains as it does in model.fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from sparkdl import SparkModel
from sparkdl.errors import WorkerError


@keras.saving.register_keras_serializable("steps")
class Taped(keras.Model):
    """A training step as in Keras's guide."""

    def moved(self):
        return self.trainable_variables

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        variables = self.moved()
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, predicted]))
        return {metric.name: metric.result() for metric in self.metrics}


@keras.saving.register_keras_serializable("steps")
class Chosen(Taped):
    """A training step that moves all variables but the first, in reverse order."""

    def moved(self):
        return self.trainable_variables[:0:-1]


@keras.saving.register_keras_serializable("steps")
class Twice(keras.Model):
    """A training step that makes two steps on a batch."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


@keras.saving.register_keras_serializable("steps")
class Confident(keras.Model):
    """A custom loss: Keras's, plus a penalty on uncertain predictions."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        doubt = -keras.ops.sum(y_pred * keras.ops.log(y_pred + 1e-6), axis=-1)
        return loss + 0.3 * keras.ops.mean(doubt)


def make(problem, kind):
    plain = problem.model()
    made = kind(plain.inputs[0], plain.outputs[0], name=kind.__name__)
    optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
    made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def whole_batches(problem):
    """Return rows of six equal batches: a loss metric updated without row counts weighs them equally."""
    return (problem.x[:192], problem.y[:192]), {"batch_size": 32, "shuffle": False, "verbose": 0}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Taped, Chosen, Confident])
def test_steps_and_losses_of_ones_own(spark, problem, kind):
    """Two workers end with the weights and the history of one process."""
    ours, reference, start = (make(problem, kind) for _ in range(3))
    rows, options = whole_batches(problem)
    expected = reference.fit(*rows, epochs=3, **options).history
    history = SparkModel(ours, num_workers=2).fit(*rows, epochs=3, **options).history

    for mine, theirs in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert (kind is Chosen) is np.array_equal(ours.get_weights()[0], start.get_weights()[0])
    assert expected.keys() == history.keys()
    for name, values in expected.items():
        assert values == pytest.approx(history[name], rel=1e-4)


@pytest.mark.whole
def test_a_step_that_applies_gradients_twice(spark, problem):
    """A step that applies gradients twice is refused if gradients are exchanged, not if weights are."""
    ours, reference = make(problem, Twice), make(problem, Twice)
    rows, options = whole_batches(problem)
    with pytest.raises(WorkerError, match="train_step should apply gradients once"):
        SparkModel(ours, num_workers=2).fit(*rows, **options)
    reference.fit(*rows, epochs=2, **options)
    SparkModel(ours, frequency="epoch", num_workers=1).fit(*rows, epochs=2, **options)

    for mine, theirs in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@keras.saving.register_keras_serializable("steps")
class WarmedUp(keras.Model):
    """A loss whose second term grows with the optimizer's steps, as a KL warm-up does."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        share = keras.ops.minimum(1.0, keras.ops.cast(self.optimizer.iterations, "float32") / 10.0)
        return loss + share * keras.ops.mean(keras.ops.square(y_pred))


@keras.saving.register_keras_serializable("steps")
class NoLoss(Taped):
    """A training step that computes its loss without Keras."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            wanted = tf.one_hot(y, 3)
            loss = tf.reduce_mean(tf.square(self(x, training=True) - wanted))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


@pytest.mark.whole
def test_a_loss_may_follow_the_optimizers_steps(spark, problem):
    """A loss can read the optimizer's step count while workers exchange gradients."""
    ours, reference = make(problem, WarmedUp), make(problem, WarmedUp)
    settings = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
    SparkModel(ours, num_workers=2).fit(problem.x, problem.y, **settings)
    reference.fit(problem.x, problem.y, **settings)

    assert problem.distance(ours, reference, problem.model().get_weights()) <= 1


def test_a_step_may_do_without_a_compiled_loss(spark, problem):
    """A step without a compiled loss trains as in Keras's guide to training steps."""

    def uncompiled():
        plain = problem.model()
        model = NoLoss(plain.inputs[0], plain.outputs[0], name="NoLoss")
        model.compile(keras.optimizers.SGD(0.3))
        return model

    ours, reference = uncompiled(), uncompiled()
    settings = {"batch_size": 32, "epochs": 1, "shuffle": False, "verbose": 0}
    SparkModel(ours, num_workers=2).fit(problem.x, problem.y, **settings)
    reference.fit(problem.x, problem.y, **settings)

    assert problem.distance(ours, reference, problem.model().get_weights()) <= 1


@keras.saving.register_keras_serializable("steps")
class Aside(keras.Model):
    """A training step that moves the variables itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


def test_a_step_that_leaves_the_optimizer_out(spark, problem):
    """A step without the optimizer is refused by name: there would be no gradients to exchange."""
    rows, options = whole_batches(problem)
    with pytest.raises(WorkerError, match="train_step should apply gradients with model.optimizer"):
        SparkModel(make(problem, Aside), num_workers=2).fit(*rows, **options)
