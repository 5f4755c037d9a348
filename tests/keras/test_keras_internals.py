"""Each private part of Keras that sparkdl uses exists in this version, and behaves as sparkdl expects."""

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.modeling import keras_internals

X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


class Penalized(layers.Layer):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor
        self.inner = layers.Dense(3, name="inner")

    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs))
        return self.inner(inputs)


@pytest.fixture
def model():
    inputs = {"a": keras.Input((3,), name="a")}
    dense = layers.Dense(3, name="dense")
    outputs = {"b": layers.Dense(1, name="b")(dense(dense(inputs["a"])))}
    made = keras.Model(inputs, outputs)
    made.compile("adam", {"b": "mse"}, metrics={"b": ["mae"]})
    return made


def test_layers_are_found_at_any_depth():
    """All layers in a model are found, and the model itself comes first."""
    sequential = keras.Sequential([keras.Input((3,)), Penalized()])

    found = keras_internals.flat_layers(sequential)

    assert sequential is found[0]
    assert "inner" in [layer.name for layer in found]
    assert keras_internals.flat_layers(sequential, include_self=False) == found[1:]


@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_calls_of_layers_are_found(kind, model):
    """Each call of a layer in the graph of a functional or a sequential model is found."""
    if kind == "sequential":
        model = keras.Sequential([keras.Input((3,)), layers.Dense(3, name="dense")])

    names = [operation.name for operation in keras_internals.calls(model)]

    assert names.count("dense") == (2 if kind == "functional" else 1)
    assert [] == list(keras_internals.calls(layers.Dense(1)))


def test_the_structures_of_inputs_and_outputs_are_found(model):
    """A functional model has the structures that it was made with; other models have none."""
    assert keras_internals.input_structure(model).keys() == {"a"}
    assert keras_internals.output_structure(model).keys() == {"b"}
    other = keras.Sequential([layers.Dense(1)])
    assert keras_internals.input_structure(other) is None
    assert keras_internals.output_structure(other) is None


def test_the_trainable_flag_of_a_layer_alone_is_set():
    """Setting the flag of a layer leaves the layers in it trainable."""
    layer = Penalized()

    keras_internals.set_own_trainable(layer, False)

    assert keras_internals.own_trainable(layer) is False
    assert layer.inner.trainable


def test_layers_that_add_losses_are_found():
    """A layer that calls add_loss is found, and a layer that does not is not."""
    layer, other = Penalized(), layers.Dense(1, kernel_regularizer="l2")
    layer(X)
    other(X)

    assert keras_internals.adds_losses(layer)
    assert not keras_internals.adds_losses(other)


def test_arguments_of_a_constructor_are_recorded():
    """Keras records the arguments of a layer of the user's own."""
    assert keras_internals.constructor_arguments(Penalized(factor=3.0)) == {"factor": 3.0}


def test_attributes_that_a_user_sets_are_no_state():
    """The attributes of a layer are divided into state and settings."""
    layer = layers.Dense(1)
    layer(X)

    settings = {name for name in vars(layer) if not keras_internals.is_state(layer, name)}

    assert {"units", "use_bias", "_trainable", "_dtype_policy", "activity_regularizer"} <= settings
    assert not {"_layers", "_metrics", "_losses", "_tracker", "_lock", "built"} & settings
    assert not any(name.startswith(("_self_", "_build_")) for name in settings)
    metric = keras.metrics.MeanSquaredError()
    assert keras_internals.is_state(metric, "_tracker")
    assert not keras_internals.is_state(metric, "name")


def test_what_compile_was_given_is_kept(model):
    """A compiled model has its arguments, and the objects that Keras made of its losses and metrics."""
    assert keras_internals.compile_arguments(model)["loss"] == {"b": "mse"}
    assert keras_internals.compile_arguments(keras.Sequential()) == {}
    for part in ("loss", "metrics"):
        made = keras_internals.compiled_part(model, part)
        given = keras_internals.given_to_compile(made)
        assert f"_user_{'loss' if part == 'loss' else 'metrics'}" in given
        keras_internals.set_compiled_part(model, part, None)
        assert keras_internals.compiled_part(model, part) is None
    assert keras_internals.compiled_part(keras.Sequential(), "loss") is None
    assert keras_internals.given_to_compile(layers.Dense(1)) is None
    assert keras_internals.public_name("_user_loss") == "loss"


def test_results_are_listed_as_evaluate_does(model):
    """The loss and the results of metrics are listed in the order of evaluate's own list."""
    expected = model.evaluate({"a": X}, {"b": Y}, verbose=0)
    logs = model.evaluate({"a": X}, {"b": Y}, verbose=0, return_dict=True)

    assert expected == pytest.approx(keras_internals.metrics_in_order(model, logs))
    assert keras_internals.loss_tracker(model).name == "loss"


def test_learning_rates_and_steps_of_optimizers_are_read():
    """The learning rate is the variable or the schedule itself, which can be replaced."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    other = keras.optimizers.schedules.ExponentialDecay(0.2, 10, 0.9)
    optimizer = keras.optimizers.SGD(schedule)

    assert keras_internals.learning_rate(optimizer) is schedule
    keras_internals.set_schedule(optimizer, other)
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    assert float(keras_internals.learning_rate(keras.optimizers.SGD(0.5))) == 0.5


def test_accumulated_batches_count_as_steps():
    """Batches are counted one by one, even if the optimizer accumulates their gradients."""
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones(3)], [variable])

    assert int(keras_internals.steps_taken(optimizer)) == 1
    assert all(one is variable for one in keras_internals.built_for(optimizer))


def test_weight_decay_is_kept_from_some_variables():
    """Variables are excluded from weight decay after the optimizer was built."""
    one, other = keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.AdamW()
    optimizer.build([one, other])
    assert keras_internals.uses_weight_decay(optimizer, one)

    keras_internals.set_excluded_from_weight_decay(optimizer, [one])

    assert not keras_internals.uses_weight_decay(optimizer, one)
    assert keras_internals.uses_weight_decay(optimizer, other)
    assert any(map(keras_internals.is_of_weight_decay, vars(optimizer)))


def test_settings_of_optimizers_are_divided_from_their_state():
    """The settings of an optimizer are found, without the attributes that building makes."""
    optimizer = keras.optimizers.Adam(beta_1=0.8, clipnorm=1.0)
    optimizer.build([keras.Variable(np.ones(3, "float32"))])

    settings = keras_internals.optimizer_settings(optimizer)

    assert (settings["beta_1"], settings["clipnorm"]) == (0.8, 1.0)
    assert not {"built", "_variables", "_trainable_variables", "_iterations", "_tracker"} & settings.keys()


def test_moments_of_adam_are_found():
    """The moments of a variable are those that a step changes."""
    variables = [keras.Variable(np.ones(size, "float32")) for size in (2, 3)]
    optimizer = keras.optimizers.Adam(beta_1=0.5, beta_2=0.5)
    optimizer.build(variables)
    optimizer.apply([keras.ops.ones(2), 2 * keras.ops.ones(3)], variables)

    first, second = keras_internals.adam_moments(optimizer, variables[1])

    np.testing.assert_allclose(keras.ops.convert_to_numpy(first.value), np.full(3, 1.0))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(second.value), np.full(3, 2.0))


def test_attributes_of_a_metric_make_another_one():
    """A metric with another metric's attributes has its variables and its result."""
    metric = keras.metrics.MeanSquaredError()
    metric.update_state(Y, 3 * Y)
    other = object.__new__(type(metric))
    keras.metrics.Metric.__init__(other)

    keras_internals.set_metric_attributes(other, keras_internals.metric_attributes(metric))

    assert len(metric.variables) == len(other.variables)
    assert float(other.result()) == pytest.approx(4.0)
    other.reset_state()
    assert float(other.result()) == 0.0


def test_arguments_of_functions_are_found():
    """The arguments of the function behind a loss or a metric are found; other objects have none."""
    loss = keras_internals.LossFunctionWrapper(keras.losses.huber, name="own", delta=2.0)
    metric = keras.metrics.BinaryAccuracy(threshold=0.25)

    assert keras_internals.function_arguments(loss) == {"delta": 2.0}
    assert keras_internals.function_arguments(metric)["threshold"] == 0.25
    assert keras_internals.function_arguments(keras.optimizers.SGD()) == {}


def test_reductions_of_losses_are_replaced():
    """Every loss is reduced by the function that is set, which receives the arguments of Keras's own."""
    seen = []

    def reduction(values, sample_weight=None, mask=None, reduction=None, dtype=None):
        seen.append(reduction)
        return keras_internals.reduce_weighted_values(values, sample_weight, mask, reduction, dtype)

    keras_internals.set_reduction(reduction)
    try:
        value = float(keras.losses.MeanSquaredError(reduction="sum")(Y, 3 * Y))
    finally:
        keras_internals.set_reduction(keras_internals.reduce_weighted_values)

    assert (value, seen) == (16.0, ["sum"])
    weights = keras_internals.apply_mask(
        keras.ops.ones(4), keras.ops.convert_to_tensor([True, True, False, True]), "float32", "sum"
    )
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(weights), [1, 1, 0, 1])


def test_serialization_is_replaced():
    """Keras makes the configuration of an object with the function that is set."""
    seen = []

    def config_of(thing):
        seen.append(thing)
        return keras_internals.class_or_function_config(thing)

    layer = layers.Dense(1)
    keras_internals.set_class_or_function_config(config_of)
    try:
        keras.saving.serialize_keras_object(layer)
    finally:
        keras_internals.set_class_or_function_config(keras_internals.class_or_function_config)

    assert any(thing is layer for thing in seen)


def test_the_shapes_of_predictions_are_computed():
    """The outputs of a model for any number of rows are known without rows."""
    model = keras.Sequential([layers.Dense(2)])

    made = keras_internals.compute_output_spec(model, keras.KerasTensor((None, 3), "float32"), training=False)

    assert made.shape == (None, 2)
    assert model.built


@pytest.mark.backend("tensorflow")
def test_a_callback_that_profiles_is_known(tmp_path):
    """TensorBoard profiles batches if it is set up to do so; on other backends it often cannot."""
    assert keras_internals.profiles_batches(keras.callbacks.TensorBoard(tmp_path, profile_batch=2))
    assert not keras_internals.profiles_batches(keras.callbacks.TensorBoard(tmp_path, profile_batch=0))


def test_a_callback_gets_rid_of_its_model(model):
    """The model of a callback is removed."""
    callback = keras.callbacks.Callback()
    callback.set_model(model)
    keras_internals.forget_model(callback)
    assert callback.model is None


def test_the_epoch_of_a_backup_is_read(tmp_path, model):
    """BackupAndRestore notes the next epoch on the model, where it stays until it is reset."""
    made = [keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False) for _ in range(2)]
    model.fit({"a": X}, {"b": Y}, epochs=2, verbose=0, callbacks=made[:1])
    made[1].set_model(model)

    made[1].on_train_begin()

    assert keras_internals.restored_epoch(model) == 2
    keras_internals.forget_restored_epoch(model)
    assert keras_internals.restored_epoch(model) is None


@pytest.mark.backend("jax")
def test_variables_on_jax_hold_arrays():
    """The array of a variable is read and set, also in a scope that gives the variable another value."""
    variable = keras.Variable(np.ones(3, "float32"))
    with keras.StatelessScope([(variable, keras.ops.zeros(3))]):
        held = keras_internals.held_value(variable)
        keras_internals.set_held_value(variable, held + 1)

    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable.value), [2, 2, 2])


@pytest.mark.backend("tensorflow")
def test_concrete_functions_are_called_with_flat_arguments():
    """A concrete function takes its arguments and its captured tensors as flat lists."""
    import tensorflow as tf

    variable = tf.Variable(2.0)
    trace = tf.function(lambda pair: [pair[0] * variable + pair[1]]).get_concrete_function(
        (tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.float32))
    )

    found = keras_internals.call_flat(trace, [tf.constant(3.0), tf.constant(1.0)], trace.captured_inputs)

    assert [float(part) for part in found] == [7.0]


def test_default_names_repeat_and_collide_with_no_other():
    """Two blocks give the same default names, which differ from those before and after the blocks."""
    before, found = layers.Dense(1).name, []
    counts = keras_internals.default_names()
    for _ in range(2):
        with keras_internals.names_from(counts):
            found.append([layers.Dense(1).name for _ in range(2)])
    after = layers.Dense(1).name

    assert found[0] == found[1]
    assert 4 == len({before, *found[0], after})
