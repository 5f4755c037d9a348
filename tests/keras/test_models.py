"""Checks of a model before training, and its serialization."""

import importlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest

from sparkdl.driver.epochs import DriverModel
from sparkdl.errors import ModelError
from sparkdl.modeling import checks, keras_variables, losses, optimizers, serialization, signature
from sparkdl.modeling.keras_variables import Layouts
from sparkdl.server.state import Snapshot


def compiled(loss="mse"):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="small")
    model.compile("adam", loss)
    return model


def test_a_model_comes_back_with_its_values_and_its_compile_arguments():
    """Weights, optimizer state, loss and metrics survive serialization."""
    model = compiled()
    model.fit(np.ones((8, 3), np.float32), np.ones((8, 2), np.float32), verbose=0)
    spec, objects = serialization.freeze(model)
    restored = serialization.thaw(spec, objects)

    assert type(model.optimizer) is type(restored.optimizer)
    assert "mse" == restored.loss
    for ours, theirs in zip(model.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(model.optimizer.variables, restored.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras_variables.read([ours])[0], keras_variables.read([theirs])[0])


def test_a_model_that_is_not_compiled_is_refused():
    """An uncompiled model is refused."""
    with pytest.raises(ModelError, match="not compiled"):
        checks.require_compiled(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))


def test_a_frozen_layers_weights_are_constants():
    """Weights of a frozen layer are not exchanged; BatchNormalization's statistics are averaged."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, trainable=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    layouts = Layouts.of(model)

    assert ((4,), (4,), (4, 1), (1,)) == layouts.trainable.shapes
    assert ((4,), (4,)) == layouts.statistics.shapes
    assert 1 == len(layouts.generators.shapes)


def adapted(scale):
    """Return a model whose first layer was adapted to rows of this scale."""
    normalization = keras.layers.Normalization(name="scale")
    normalization.adapt(scale * np.arange(12, dtype=np.float32).reshape(4, 3))
    layers = [keras.Input((3,), name="rows"), normalization, keras.layers.Dense(2, name="out")]
    model = keras.Sequential(layers, name="adapted")
    model.compile("sgd", "mse")
    return model


def test_an_adapted_layer_comes_back_adapted():
    """An adapted layer is restored with its constants, which are not variables."""
    model, x = adapted(5.0), np.ones((1, 3), np.float32)
    spec, objects = serialization.freeze(model)

    np.testing.assert_allclose(serialization.thaw(spec, objects)(x), model(x), rtol=1e-6)
    assert () == Layouts.of(model).statistics.shapes


def test_a_model_that_was_adapted_anew_is_another():
    """A newly adapted model has another key: compiled replicas hold the old constants."""
    model = adapted(5.0)
    first, same = (serialization.freeze(model)[0].key for _ in range(2))
    model.layers[0].adapt(np.eye(3, dtype=np.float32))

    assert first == same
    assert first != serialization.freeze(model)[0].key


SCALED = """
import keras

class Scaled(keras.layers.Layer):
    def call(self, inputs):
        return {factor} * inputs
"""


def test_a_model_with_another_optimizer_of_its_kind_is_the_same():
    """Optimizers named sgd_1, sgd_2 and so on give the same key, so that no worker compiles anew."""
    parts = [keras.Input((3,), name="rows"), keras.layers.Dense(1, name="out")]
    keys = set()
    for optimizer in ("sgd", "sgd", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "adam"):
        model = keras.Sequential(parts, name="small")
        model.compile(optimizer, "mse")
        keys.add(serialization.freeze(model)[0].key)

    assert 3 == len(keys)


def test_a_module_that_was_edited_and_loaded_again_makes_another_model(tmp_path, monkeypatch):
    """An edited and reloaded module changes the model's key, so that workers do not run old code."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keys = []
    for factor in (2.0, 2.0, 3.0):
        (tmp_path / "edited_layers.py").write_text(SCALED.format(factor=factor))
        module = sys.modules.get("edited_layers")
        if module is None or factor == 3.0:
            module = importlib.reload(module) if module else importlib.import_module("edited_layers")
        parts = [keras.Input((3,), name="rows"), module.Scaled(name="s"), keras.layers.Dense(1, name="out")]
        model = keras.Sequential(parts, name="scaled")
        model.compile(keras.optimizers.SGD(0.1), "mse")
        keys.append(serialization.freeze(model)[0].key)
    monkeypatch.delitem(sys.modules, "edited_layers")

    assert keys[0] == keys[1] != keys[2]


class OwnCompile(keras.Sequential):
    """A model with a custom compile."""

    def compile(self, speed):
        super().compile(keras.optimizers.SGD(speed), "mse")


@pytest.mark.filterwarnings("ignore:`compile..` was not called as part of model loading")
def test_a_compile_of_the_models_own_needs_its_configuration():
    """A custom compile without get_compile_config is refused with a hint: Keras cannot repeat it."""
    model = OwnCompile([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(0.1)

    with pytest.raises(ModelError, match="OwnCompile has its own compile method. Define get_compile_config"):
        serialization.freeze(model)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="MultiOptimizer came with Keras 3.14"
)
def test_several_optimizers_are_refused_by_name():
    """MultiOptimizer is refused by name: it has several learning rates and step counts."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.1)), "mse")

    with pytest.raises(ModelError, match="compiled with a MultiOptimizer, .* Use one optimizer"):
        checks.require_honoured(model)


def test_workers_drop_other_units_and_the_same_in_every_run():
    """Worker 0 draws the model's own random numbers, other workers different ones, repeatably."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5)])
    model.compile("sgd", "mse")
    spec, objects = serialization.freeze(model)
    drawn = []
    for worker in (0, 1, 1, 2):
        replica = serialization.thaw(spec, objects)
        keras_variables.set_generators(replica, spec.generators, worker)
        drawn.append(np.asarray(keras.ops.convert_to_numpy(replica(np.ones((1, 50)), training=True))))
    first, one, again, two = drawn

    np.testing.assert_array_equal(first, keras.ops.convert_to_numpy(model(np.ones((1, 50)), training=True)))
    np.testing.assert_array_equal(one, again)
    assert not any(np.array_equal(a, b) for a, b in ((first, one), (first, two), (one, two)))


WORDS = ["good", "bad", "", "good", "ünd", "a\nb"]
VOCABULARIES = {
    "integers": lambda: (keras.layers.IntegerLookup(), np.array([[3], [5]])),
    "words": lambda: (keras.layers.StringLookup(), WORDS),
    "several unknown": lambda: (keras.layers.StringLookup(num_oov_indices=3, mask_token=""), WORDS),
    "no mark of the unknown": lambda: (keras.layers.StringLookup(oov_token=None), WORDS),
    "counts": lambda: (keras.layers.StringLookup(output_mode="multi_hot"), WORDS),
    "weights": lambda: (keras.layers.StringLookup(output_mode="tf_idf"), [WORDS, WORDS[:3] * 2]),
    "padded weights": lambda: (
        keras.layers.TextVectorization(20, output_mode="tf_idf", pad_to_max_tokens=True),
        WORDS,
    ),
    "text": lambda: (keras.layers.TextVectorization(output_sequence_length=2, ngrams=2), WORDS),
    "given": lambda: (keras.layers.TextVectorization(vocabulary=["bad"], output_sequence_length=2), None),
}


class Reader(keras.Model):
    """A model that computes with strings before its first layer."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.text = keras.layers.TextVectorization(output_sequence_length=2)
        self.text.adapt(WORDS)
        self.embedding = keras.layers.Embedding(8, 2)

    def call(self, words):
        import tensorflow as tf

        return self.embedding(self.text(tf.strings.lower(words)))


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("builds", [False, True])
def test_a_vocabulary_travels_with_the_model(kind, builds):
    """A restored model has the live vocabulary, even if its configuration does not."""
    import tensorflow as tf

    def model_of(layer):
        inputs = keras.Input((1,), dtype="int64" if kind == "integers" else "string")
        outputs = keras.layers.Lambda(lambda x: keras.ops.cast(x, "float32"))(layer(inputs))
        return keras.Model(inputs, outputs)

    layer, data = VOCABULARIES[kind]()
    model = model_of(layer)
    if data is not None:
        layer.adapt(data)
    builder = (lambda: model_of(VOCABULARIES[kind]()[0])) if builds else None

    spec, objects = serialization.freeze(model, builder, trains=False)
    again = serialization.thaw(spec, objects, builder)

    x = tf.constant([[3], [4]] if kind == "integers" else [["good ünd"], ["bad"], ["a\nb"], ["new"], [""]])
    np.testing.assert_array_equal(again(x), model(x))


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("builds", [False, True])
def test_a_class_that_computes_with_strings_is_built_again(builds):
    """A model class whose call takes only strings is restored with its weights."""
    import tensorflow as tf

    model, x = Reader(), tf.constant(["GOOD", "bad"])
    expected, builder = model(x), Reader if builds else None

    again = serialization.thaw(*serialization.freeze(model, builder, trains=False), builder)

    np.testing.assert_array_equal(again(x), expected)


@pytest.mark.backend("tensorflow")
def test_a_batch_size_of_strings_is_tried_out():
    """A fixed batch size of a string Input that no layer needs is detected by a trial."""
    words = keras.Input(batch_shape=(16, 1), dtype="string")
    model = keras.Model(words, keras.layers.StringLookup(vocabulary=WORDS[:2])(words))

    assert signature.fixed_batch_size(model, batch_size=3, validation_batch_size=None) is None


@pytest.mark.backend("tensorflow")
def test_models_with_other_vocabularies_have_other_keys():
    """Models with different vocabularies have different keys, so that cached replicas match."""
    lookup = keras.layers.StringLookup()
    model = keras.Sequential([keras.Input((1,), dtype="string"), lookup])
    keys = []
    for words in (["a", "b"], ["a", "c"], ["a", "b"]):
        lookup.adapt(words)
        keys.append(serialization.freeze(model, trains=False)[0].key)

    assert keys[0] == keys[2] != keys[1]


class Counting(keras.layers.Layer):
    """A layer that counts its calls."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1)
        return inputs


def test_counters_go_with_the_generators():
    """Counters are saved in snapshots like random generators, but only generators differ by worker."""
    model = keras.Sequential(
        [keras.Input((3,)), Counting(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    before = keras_variables.read(keras_variables.generators(model))
    keras_variables.set_generators(model, before, 3)
    after = keras_variables.read(keras_variables.generators(model))

    assert [(2,), ()] == [array.shape for array in before]
    assert [3, 0] == [int(np.max(b - a)) for a, b in zip(before, after, strict=True)]


class Late(keras.Model):
    """A model that is built by the first rows it sees."""

    def __init__(self, width=2):
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def call(self, inputs):
        return self.dense(inputs)


def test_a_function_may_build_a_model_that_its_first_rows_build():
    """A function may return a model that is built by its first rows, on the driver and on workers."""

    def build():
        model = Late()
        model.compile("sgd", "mse")
        return model

    model, x = build(), np.ones((4, 3), np.float32)
    expected = model(x)
    spec, objects = serialization.freeze(model, build)

    np.testing.assert_array_equal(serialization.thaw(spec, objects, build)(x), expected)


def test_a_function_that_builds_another_model_each_time_is_refused():
    """A function that builds a different model each time is refused on the driver."""
    widths = iter((2, 3))

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(next(widths))])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ModelError, match="should return the same model each time"):
        serialization.freeze(build(), build)


@pytest.mark.one_case
@pytest.mark.parametrize(("missing", "extra"), [("pyspark", "spark"), (keras.backend.backend(),) * 2])
def test_what_is_not_installed_is_named_with_the_line_that_installs_it(missing, extra):
    """`import sparkdl` works without an optional package; functions that need it raise an install hint."""
    code = f"import sys; sys.modules[{missing!r}] = None; import sparkdl; sparkdl.SparkModel"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (
        f"sparkdl.SparkModel needs {missing}. Install it: pip install 'sparkdl-keras[{extra}]'" in run.stderr
    )


def test_optimizers_of_low_precision_are_averaged_by_rows():
    """Optimizer states of workers that train separately are averaged by rows, also in low precision."""
    layers = [keras.Input((3,)), keras.layers.Dense(1, use_bias=False, dtype="bfloat16")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    driver = DriverModel(model, joint=False)
    layout = driver.layouts.optimizer
    states = {}
    for worker, value in enumerate((1.0, 5.0)):
        arrays = [
            np.full(shape, value, dtype) for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        ]
        states[worker] = layout.to_bytes(arrays)
    snapshot = Snapshot(1, driver.parameters(), driver.statistics(), 1, 1.0, states)
    driver.load(snapshot, (10, 30))

    momentum = keras_variables.read(optimizers.variables(model))[-1]
    assert ("bfloat16", [4.0] * 3) == (momentum.dtype.name, momentum.ravel().tolist())


def test_a_constraint_holds_in_the_model_whatever_was_merged():
    """The model satisfies its constraints even if momentum or a stale delta moved the center beyond."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_constraint="non_neg")])
    model.compile("sgd", "mse")
    driver = DriverModel(model, joint=False)
    driver.load(Snapshot(1, np.float32([0.5, -0.25, 0, -1]), driver.statistics(), 1, 1.0), (10,))

    assert [[0.5], [0.0], [0.0]] == model.get_weights()[0].tolist()
    assert [-1.0] == model.get_weights()[1].tolist()


@pytest.mark.parametrize(("momentum", "known"), [(0.0, True), (0.99, True), (1 - 1e-9, False), (1.0, False)])
def test_a_moving_average_that_hardly_moves_has_no_decay_to_divide_by(momentum, known):
    """A moving average with a momentum of 1 in float32 counts as one of unknown decay."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(momentum=momentum)])

    np.testing.assert_array_equal(
        [momentum if known else np.nan] * 4, keras_variables.decays(model).astype(float).round(4)
    )


@pytest.mark.parametrize("builds", [False, True])
def test_making_a_model_again_draws_nothing_from_the_global_generators(builds):
    """Restoring draws nothing from the global generators, so later models start as after plain Keras."""

    def build():
        np.random.uniform()
        return compiled()

    def drawn():
        return random.random(), np.random.uniform(), compiled().get_weights()[0].tolist()

    model = compiled()
    builder = build if builds else None
    checked = []
    keras.utils.set_random_seed(1)
    expected = drawn()
    keras.utils.set_random_seed(1)
    spec, objects = serialization.freeze(model, builder, check=checked.append)
    serialization.thaw(spec, objects, builder)
    serialization.copy_of(model)
    losses.check(model, np.ones((4, 3)), np.ones((4, 2)), None, np.ones((4, 2)))

    assert checked
    assert expected == drawn()


def test_an_executor_without_cloudpickle_restores_an_optimizer(monkeypatch):
    """An optimizer from before a layer was frozen is restored with PySpark's copy of cloudpickle."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.layers[0].trainable = False
    frozen = serialization.freeze(model)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    again = serialization.thaw(*frozen)

    expected, found = (keras_variables.read(one.optimizer.variables) for one in (model, again))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
