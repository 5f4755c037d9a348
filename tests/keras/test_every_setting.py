"""Each setting of Keras's own objects trains on two workers as in one process, number for number.

The classes and arguments come from Keras by introspection, see ``tests/settings.py``. The default suite
trains one argument of each class. Losses, metrics, constraints and regularizers share a model there, in which
each member has its own layer, output or metric, named with its mark. ``pytest --all`` trains every argument
alone.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import settings as table
from keras import layers, ops
from worker_threads import even_split, fit

from sparkdl.modeling import keras_metrics, keras_variables, proof, serialization

pytestmark = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15),
    reason="the table is for Keras 3.15 and later; older versions cannot train some of its members",
)
ROWS, BATCH, EPOCHS = 14, 8, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype("float32")
Y = (X @ RNG.normal(size=(5, 4))).astype("float32")
LABELS = RNG.integers(0, 4, (ROWS, 4))
ONE_HOT = np.eye(4, dtype="float32")[LABELS]
SOFT = 0.1 + 0.6 * ONE_HOT
MIXED = (SOFT * RNG.uniform(0.5, 1.5, SOFT.shape)).astype("float32")


class Problem(NamedTuple):
    """A compiled model of some members, and the rows to train it on."""

    model: Any
    x: Any
    y: Any


def mark(place):
    """Return the prefix of the names of a member's layers, outputs and metrics."""
    return f"of{place}_"


def dense(units, place=0, name="dense", **named):
    """Return a layer of a member, with the same initial weights for every member."""
    kernel = keras.initializers.GlorotUniform(seed=3)
    return layers.Dense(units, kernel_initializer=kernel, name=mark(place) + name, **named)


# One function per family builds a model from members.


def with_losses(members):
    """Return a model with an output for each loss."""
    inputs, outputs, y, compiled = keras.Input((5,)), {}, {}, {}
    for place, setting in enumerate(members):
        name, kind = f"{mark(place)}out", setting.kind.__name__
        linear = kind == "CTC" or setting.argument == "from_logits"
        rows = layers.Reshape((4, 4))(dense(16, place)(inputs))
        outputs[name] = layers.Activation("linear" if linear else "softmax", name=name)(rows)
        sparse = "Sparse" in kind or kind == "CategoricalGeneralizedCrossEntropy"
        y[name] = LABELS if sparse else ONE_HOT if "Hinge" in kind else SOFT
        y[name] = 1 + LABELS[:, :2] % 3 if kind == "CTC" else y[name]
        compiled[name] = setting.kind(**setting.values)
    alone = len(members) == 1
    model = keras.Model(inputs, outputs["of0_out"] if alone else outputs)
    model.compile(keras.optimizers.SGD(0.02), compiled["of0_out"] if alone else compiled, run_eagerly=True)
    return Problem(model, X, y["of0_out"] if alone else y)


def classified(z):
    return ops.floor(4 * ops.sigmoid(z))


MEASURED = {  # labels, units, and a function of the predictions
    "flat": (ONE_HOT[:, 0], 4, ops.softmax),
    "logits": (ONE_HOT[:, 0], 4, lambda z: 2 * z),
    "deep": (MIXED, 16, lambda z: ops.softmax(ops.reshape(z, (-1, 4, 4)))),
    "labels": (LABELS[:, :1], 4, ops.softmax),
    "label_logits": (LABELS[:, :1], 4, lambda z: 2 * z),
    "deep_labels": (LABELS, 16, lambda z: ops.softmax(ops.reshape(z, (-1, 4, 4)))),
    "classes": (LABELS[:, :1], 1, classified),
    "ranked": (LABELS[:, :1], 4, classified),
    "one_hot_classes": (ONE_HOT[:, 0], 1, classified),
    "binary": (LABELS[:, :1] % 2, 1, ops.sigmoid),
    "values": (Y[:, :2], 2, lambda z: 3 * z),
}


def measured_by(setting):
    """Return the key in MEASURED of the output that suits a metric."""
    name, values = setting.kind.__name__, setting.values
    sparse = name.startswith("Sparse")
    if name in ("BinaryIoU", "R2Score"):
        return "binary" if name == "BinaryIoU" else "values"
    if name in ("IoU", "MeanIoU", "Accuracy"):
        if not values.get("sparse_y_pred", True):
            return "labels"
        return "classes" if values.get("sparse_y_true", True) else "one_hot_classes"
    if values.get("sparse_y_pred"):
        return "one_hot_classes"
    if setting.argument in ("from_logits", "from_sorted_ids"):
        return "ranked" if setting.argument == "from_sorted_ids" else "label_logits" if sparse else "logits"
    deep = setting.argument == "axis"
    return ("deep_labels" if deep else "labels") if sparse else "deep" if deep else "flat"


def with_metrics(members):
    """Return a model that trains one output, with metrics of others."""
    inputs, metrics = keras.Input((5,)), {}
    for place, setting in enumerate(members):
        named = {**setting.values, "name": f"{mark(place)}metric"}
        metrics.setdefault(measured_by(setting), []).append(setting.kind(**named))
    hidden = dense(6, activation="tanh")(inputs)
    outputs, y = {"trained": layers.Identity(name="trained")(dense(4, name="last")(hidden))}, {"trained": Y}
    for name in metrics:
        y[name], units, predict = MEASURED[name]
        fixed = dense(units, name=name, trainable=False)(hidden)
        outputs[name] = layers.Identity(name=name)(predict(fixed))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), {"trained": "mse"}, metrics=metrics, run_eagerly=True)
    return Problem(model, X, y)


def in_layers(argument, members):
    """Return a model with a layer, and an output, for each constraint or regularizer."""
    inputs, outputs = keras.Input((5,)), {}
    for place, setting in enumerate(members):
        layer = dense(4, place, **{argument: setting.kind(**setting.values)})
        outputs[f"{mark(place)}out"] = layers.Identity(name=f"{mark(place)}out")(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), dict.fromkeys(outputs, "mse"), run_eagerly=True)
    return Problem(model, X, dict.fromkeys(outputs, Y))


RATES = {"Adadelta": 1.0, "Adagrad": 0.05, "Ftrl": 0.1, "SGD": 0.05, "Adafactor": 0.05, "Lion": 0.1}
BUILT_BEFORE = "ScheduleFreeAdamW"  # docs/explanation/modes.md has the reason


def with_optimizer(members):
    """Return a model of two layers with an optimizer."""
    (setting,) = members
    inputs = keras.Input((5,))
    hidden = dense(4, name="first", activation="tanh")(inputs)
    if setting.argument == "exclude_embeddings":
        rows = layers.Embedding(3, 4, embeddings_initializer=keras.initializers.Ones(), name="of0_rows")
        hidden = layers.Add()([hidden, rows(inputs[:, 0] > 0)])
    model = keras.Model(inputs, dense(4, name="second")(hidden))
    rate, named = RATES.get(setting.kind.__name__, 0.01), setting.values
    if setting.kind is keras.optimizers.LossScaleOptimizer:
        made = setting.kind(keras.optimizers.SGD(0.05), **named)
    else:
        made = setting.kind(**{"learning_rate": rate, **named})
    model.compile(made, "mse", run_eagerly=True)
    return Problem(model, X, Y)


def with_schedule(members):
    """Return a model whose learning rate a schedule gives."""
    (setting,) = members
    inputs = keras.Input((5,))
    model = keras.Model(inputs, dense(4)(inputs))
    model.compile(keras.optimizers.SGD(setting.kind(**setting.values)), "mse", run_eagerly=True)
    return Problem(model, X, Y)


FAMILIES = {
    "losses": (with_losses, keras.losses, keras.losses.Loss),
    "metrics": (with_metrics, keras.metrics, keras.metrics.Metric),
    "constraints": (
        functools.partial(in_layers, "kernel_constraint"),
        keras.constraints,
        keras.constraints.Constraint,
    ),
    "regularizers": (
        functools.partial(in_layers, "kernel_regularizer"),
        keras.regularizers,
        keras.regularizers.Regularizer,
    ),
    "activity": (
        functools.partial(in_layers, "activity_regularizer"),
        keras.regularizers,
        keras.regularizers.Regularizer,
    ),
    "optimizers": (with_optimizer, keras.optimizers, keras.optimizers.Optimizer),
    "schedules": (
        with_schedule,
        keras.optimizers.schedules,
        keras.optimizers.schedules.LearningRateSchedule,
    ),
}
SETTINGS = {name: table.settings_of(*of) for name, (_, *of) in FAMILIES.items()}
# As an activity regularizer it compares the rows of a batch: docs/explanation/modes.md.
SETTINGS["activity"] = [s for s in SETTINGS["activity"] if s.kind.__name__ != "OrthogonalRegularizer"]


# The comparison.


class Run(NamedTuple):
    """The outcome of a training: weights by path, the optimizer's variables, and the history."""

    before: dict
    after: dict
    slots: list
    history: dict

    def of(self, place):
        """Return the movement of one member's weights and its results as one vector."""
        moved = [self.after[path] - self.before[path] for path in self.after if mark(place) in path]
        shown = [values for name, values in self.history.items() if mark(place) in name]
        return np.concatenate([np.ravel(part) for part in moved + shown])


def run(fit, family, members):
    """Train a model of some members."""
    model, x, y = FAMILIES[family][0](members)
    before = values_of(model)
    history = fit(model, x, y)
    return Run(before, values_of(model), keras_variables.read(model.optimizer.variables), history)


def values_of(model):
    return {weight.path: value for weight, value in zip(model.weights, model.get_weights(), strict=True)}


def plain(model, x, y):
    """Train in one process."""
    if type(model.optimizer).__name__ == BUILT_BEFORE:
        model.optimizer.build(model.trainable_variables)
    return model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history


on_workers = functools.partial(fit, rows=even_split(ROWS, 2), batch_size=BATCH, epochs=EPOCHS)


def apart(expected, found):
    """Return the differences beyond 1e-5 of the movement and the rounding of float32."""
    wrong = {}
    for path, after in expected.after.items():
        bound = 1e-5 * np.linalg.norm(after - expected.before[path]) + 2.4e-7 * np.linalg.norm(after)
        if not (off := np.linalg.norm(found.after[path] - after)) <= bound:
            wrong[path] = off, bound
    for place, slot in enumerate(expected.slots):
        if not (off := np.linalg.norm(found.slots[place] - slot)) <= 1e-5 * np.linalg.norm(slot) + 1e-7:
            wrong[f"slot {place}"] = off, np.linalg.norm(slot)
    for name in expected.history.keys() | found.history.keys():
        pair = found.history.get(name), expected.history.get(name)
        if None in pair or not np.allclose(*pair, rtol=1e-5, atol=1e-7):
            wrong[name] = pair
    return wrong


def without(family, setting):
    """Return the setting without its argument, and a key that equal ones share."""
    base, problem = setting.without(), ""
    if setting.argument in ("from_logits", "exclude_embeddings"):
        problem = setting.argument
    elif family == "metrics":
        problem = measured_by(base)
    return base, str((family, setting.kind, base.values, problem))


# The tests.

TOGETHER = ["losses", "metrics", "constraints", "regularizers", "activity"]
# Beside other losses this one is weighed by rows: see "losses of several outputs" in
# docs/explanation/modes.md.
ALONE = ["SparseCategoricalCrossentropy(ignore_class)"]
USABLE = {
    family: [setting for setting in settings if str(setting) not in table.UNUSABLE]
    for family, settings in SETTINGS.items()
}


def few(family):
    """Return one setting of each class for the default suite, each with another argument."""
    kinds = {}
    for setting in USABLE[family]:
        if str(setting) not in ALONE:
            kinds.setdefault(setting.kind, []).append(setting)
    found = []
    for place, members in enumerate(kinds.values()):
        matter = [setting for setting in members if setting.changes] or members[:1]
        found.append(matter[place % len(matter)])
    return found


def by_name():
    """Return every setting; those that the default suite does not train alone are marked as ``whole``."""
    chosen = {name: ALONE if name in TOGETHER else [*map(str, few(name))] for name in FAMILIES}
    return [
        pytest.param(
            family,
            setting,
            id=f"{family}-{setting}",
            marks=() if str(setting) in chosen[family] else pytest.mark.whole,
        )
        for family, settings in USABLE.items()
        for setting in settings
    ]


@pytest.mark.whole
@pytest.mark.parametrize("family", TOGETHER)
def test_members_of_a_family_train_in_one_model_as_in_one_process(family):
    """Two workers get the weights and the history of one process, and each argument changes them."""
    members = few(family)
    bases = {key: base for base, key in (without(family, each) for each in members if each.changes)}
    every = members + list(bases.values())
    places = {key: len(members) + place for place, key in enumerate(bases)}
    expected = run(plain, family, every)
    idle = [
        str(setting)
        for place, setting in enumerate(members)
        if setting.changes and same(expected.of(place), expected.of(places[without(family, setting)[1]]))
    ]

    assert apart(expected, run(on_workers, family, every)) == {}
    assert idle == []


def same(one, other):
    """Return True if two results are the same, with and without an argument."""
    return one.shape == other.shape and np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)


BASES = {}


@pytest.mark.parametrize(("family", "setting"), by_name())
def test_a_setting_trains_as_in_one_process(family, setting):
    """Two workers get the weights, optimizer variables and history of one process."""
    expected = run(plain, family, [setting])

    assert apart(expected, run(on_workers, family, [setting])) == {}
    if setting.changes:
        base, key = without(family, setting)
        if key not in BASES:
            BASES[key] = run(plain, family, [base])
        assert not same(expected.of(0), BASES[key].of(0))


@pytest.mark.parametrize("name", table.UNUSABLE)
def test_unusable_arguments_fail_in_keras(name):
    """Plain Keras fails with each argument that the table leaves out as unusable."""
    (setting,) = [each for each in SETTINGS["metrics"] if str(each) == name]
    with pytest.raises(Exception, match="dimension"):
        run(plain, "metrics", [setting])


@pytest.mark.whole
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in TOGETHER else pytest.mark.whole) for name in FAMILIES]
)
def test_a_model_with_any_setting_is_proved_to_be_the_same(family):
    """The model made by workers computes the live model's results on the driver, for each setting."""
    for group in [USABLE[family]] if family in TOGETHER else [[each] for each in USABLE[family]]:
        model, x, y = FAMILIES[family][0](group)
        first = (*keras.tree.map_structure(lambda part: part[:1], (x, y)), None)
        keras_metrics.build_metrics(model, *first)

        serialization.freeze(model, check=functools.partial(proof.require_same, model, first=first))


def objects_of(family, model):
    """Return the members that a model was compiled with."""
    if family == "losses":
        return keras.tree.flatten(model.loss)
    if family == "metrics":
        return [metric for metric in keras_metrics.metrics_of(model) if metric.name.endswith("_metric")]
    optimizer = model.optimizer
    return [optimizer._learning_rate if family == "schedules" else optimizer]


@pytest.mark.parametrize(
    "family", ["losses", "metrics", "schedules", pytest.param("optimizers", marks=pytest.mark.whole)]
)
def test_arguments_that_change_no_result_come_to_workers(family):
    """Objects keep their configuration and dtype when they are sent to a worker."""
    members = [each for each in USABLE[family] if each.argument and not each.changes]
    for group in [members] if family in TOGETHER else [[each] for each in members]:
        model, x, y = FAMILIES[family][0](group)
        first = keras.tree.map_structure(lambda part: part[:2], (x, y))
        keras_metrics.build_metrics(model, *first)
        again = serialization.thaw(*serialization.freeze(model))
        keras_metrics.build_metrics(again, *first)

        for ours, theirs in zip(objects_of(family, model), objects_of(family, again), strict=True):
            expected, found = map(keras.saving.serialize_keras_object, (ours, theirs))
            assert json.dumps(found) == json.dumps(expected)
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


def test_the_table_has_every_class_and_argument_of_keras():
    """A new argument of Keras fails here by name until the table has a value for it."""
    kinds = [kind for _, *of in FAMILIES.values() for kind in table.classes(*of)]

    assert [name for kind in kinds for name in table.unknown(kind)] == []


def test_the_docs_name_every_exception():
    """The table of differences from plain Keras names each class that the table of settings excepts."""
    docs = (Path(__file__).parents[2] / "docs" / "explanation" / "modes.md").read_text()
    differences = docs.partition("## What differs from plain Keras")[2]

    assert [name for name in table.DOCUMENTED if f"`{name}" not in differences] == []
