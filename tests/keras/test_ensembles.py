"""The model of an ensemble combines its members as NumPy does, and is saved and loaded as one."""

import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import sparkdl
from sparkdl import Ensemble, SparkModel
from sparkdl.data.arrays import as_rows
from sparkdl.errors import ConfigError, ModelError
from sparkdl.modeling.ensemble_layers import Spread, Vote
from sparkdl.tune.members import TrainingRows, built, resampled, side_by_side
from sparkdl.tune.rows import count_of, folds_of, require_samples

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int64") + (X[:, 1] > 0)
SPARSE = "sparse_categorical_crossentropy"


def network(units=3, activation="softmax", loss=SPARSE, *, inputs=6, name="network"):
    parts = [
        keras.Input((inputs,)),
        layers.Dense(8, "tanh"),
        layers.Dropout(0.5),
        layers.Dense(units, activation),
    ]
    model = keras.Sequential(parts, name=name)
    if loss is not None:
        model.compile("adam", loss, metrics=["accuracy"] if units > 1 else ["mae"])
    return model


def predict(model, x=X):
    """Return the predictions as arrays, without the tracing of model.predict, which takes time."""
    return keras.tree.map_structure(keras.ops.convert_to_numpy, model(x, training=False))


def outputs(models, x=X):
    return np.stack([predict(model, x) for model in models])


@pytest.fixture(scope="module")
def three():
    """Three models with the same name and different weights."""
    keras.utils.set_random_seed(0)
    return [network() for _ in range(3)]


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(weights=weights, seed=st.integers(0, 1000))
def test_layers_compute_the_weighted_mean_and_deviation(weights, seed):
    """The layers return the weighted mean, the share of votes, and the weighted standard deviation."""
    shares = np.array(weights) / np.sum(weights)
    given = np.random.default_rng(seed).random((len(shares), 5, 4)).astype("float32")
    parts = [keras.ops.convert_to_tensor(part) for part in given]
    mean = np.average(given, axis=0, weights=shares)
    votes = np.average(np.eye(4)[given.argmax(-1)], axis=0, weights=shares)
    deviation = np.average((given - mean) ** 2, axis=0, weights=shares) ** 0.5

    def found(layer):
        return keras.ops.convert_to_numpy(layer(parts))

    np.testing.assert_allclose(found(Vote(shares.tolist())), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found(Vote(shares.tolist(), "hard")), votes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found(Spread(shares.tolist())), deviation, rtol=1e-3, atol=1e-4)


def test_a_soft_vote_is_the_weighted_mean(three):
    """A soft vote returns the weighted mean of the members' outputs, and weights are divided by their sum."""
    ensemble = Ensemble(three, weights=[2, 1, 1])
    expected = np.average(outputs(three), axis=0, weights=[2, 1, 1])

    np.testing.assert_allclose(predict(ensemble.model), expected, rtol=1e-5)
    assert [0.5, 0.25, 0.25] == ensemble.weights
    assert "Ensemble(members: 3, voting: soft, weights: [0.5, 0.25, 0.25], spread: False)" == repr(ensemble)


def test_an_ensemble_has_the_loss_and_the_metrics_of_its_members(three):
    """Keras evaluates an ensemble by the loss and the metrics that a member was compiled with."""
    ensemble = Ensemble([network(loss=None), *three])
    mean = outputs(ensemble.members).mean(axis=0)
    loss, accuracy = ensemble.model.evaluate(X, Y, verbose=0)

    assert pytest.approx(-np.log(mean[np.arange(len(Y)), Y]).mean(), rel=1e-4) == loss
    assert pytest.approx((mean.argmax(axis=1) == Y).mean()) == accuracy


def test_metrics_are_not_shared():
    """Objects given to compile work in the ensemble too, without the state that they have in the member."""
    member = network(loss=None)
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    member.compile("sgd", keras.losses.SparseCategoricalCrossentropy(), metrics=metrics)
    accuracy = member.evaluate(X, Y, verbose=0)[1]
    ensemble = Ensemble([member], spread=True)
    labels = {"prediction": Y[:7], "uncertainty": Y[:7]}

    assert pytest.approx(accuracy) == Ensemble([member]).model.evaluate(X, Y, verbose=0)[1]
    assert ensemble.model.evaluate(X[:7], labels, verbose=0)
    assert pytest.approx(accuracy) == float(metrics[0].result())


def test_metrics_with_lists_and_dicts_are_copied():
    """Metrics whose attributes are lists or dicts, which Keras tracks, work in an ensemble."""
    member = network(1, "sigmoid", None)
    kinds = keras.metrics.Precision, keras.metrics.BinaryAccuracy, keras.metrics.BinaryIoU
    member.compile("sgd", "binary_crossentropy", metrics=[kind() for kind in kinds])
    labels = (Y > 0).astype("float32")[:, None]

    expected = member.evaluate(X, labels, verbose=0)
    assert pytest.approx(expected) == Ensemble([member]).model.evaluate(X, labels, verbose=0)


def test_members_are_copies(three):
    """A member that is trained or renamed later does not change the ensemble, and the ensemble is frozen."""
    member = network()
    ensemble = Ensemble([member, member])
    before = predict(ensemble.model)
    member.set_weights([weight + 1 for weight in member.get_weights()])

    assert np.array_equal(before, predict(ensemble.model))
    assert [] == ensemble.model.trainable_variables
    assert ["network"] * 3 == [model.name for model in three]


@pytest.mark.parametrize(
    ("loss", "activation", "threshold"),
    [("binary_crossentropy", "sigmoid", 0.5), (keras.losses.BinaryCrossentropy(from_logits=True), None, 0.0)],
)
def test_one_unit_votes_by_its_threshold(loss, activation, threshold):
    """Members with one unit vote for the second class above 0.5, or above 0 if they return logits."""
    members = [network(1, activation, loss) for _ in range(3)]
    ensemble = Ensemble(members, voting="hard", weights=[1, 1, 2])
    expected = np.average(outputs(members) > threshold, axis=0, weights=[1, 1, 2])

    np.testing.assert_allclose(predict(ensemble.model), expected)
    loss, _ = ensemble.model.evaluate(X, (Y > 0).astype("float32"), verbose=0)
    chosen = np.clip(np.where(Y[:, None] > 0, expected, 1 - expected), 1e-7, 1)
    assert pytest.approx(-np.log(chosen).mean(), rel=0.01) == loss  # Keras rounds in float32


METRICS = {
    "from_logits": lambda logits: keras.metrics.BinaryCrossentropy(from_logits=logits),
    "auc": lambda logits: keras.metrics.AUC(from_logits=logits),
    "threshold": lambda logits: keras.metrics.BinaryAccuracy(threshold=0.0 if logits else 0.5),
    "thresholds": lambda logits: keras.metrics.Precision([0.0] if logits else [0.5]),
    "default": lambda logits: keras.metrics.Recall(),
    "name": lambda logits: "accuracy",
    "function": lambda logits: keras.metrics.MeanMetricWrapper(
        keras.losses.binary_crossentropy, name="mean", from_logits=logits
    ),
    "weighted": lambda logits: keras.metrics.BinaryCrossentropy(name="weighted", from_logits=logits),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_logits_take_shares_of_votes(name):
    """The metrics of members that return logits are those of probabilities in an ensemble of votes."""
    argument = "weighted_metrics" if name == "weighted" else "metrics"
    members = [network(1, None, None) for _ in range(3)]
    members[0].compile(
        "sgd", keras.losses.BinaryCrossentropy(from_logits=True), **{argument: [METRICS[name](True)]}
    )
    model = Ensemble(members, voting="hard").model
    expected = keras.Model(model.inputs, model.outputs)
    expected.compile("sgd", "binary_crossentropy", **{argument: [METRICS[name](False)]})
    labels = (Y > 0).astype("float32")[:, None]

    np.testing.assert_allclose(
        np.hstack(model.evaluate(X, labels, verbose=0)), np.hstack(expected.evaluate(X, labels, verbose=0))
    )


def of_logits(y, predicted):
    return keras.ops.cast((predicted > 0) == (y > 0), "float32")


@pytest.mark.parametrize(
    "metric", [of_logits, lambda: keras.metrics.MeanMetricWrapper(of_logits, "of_logits")]
)
def test_a_metric_that_may_be_of_logits_is_refused_in_votes(metric):
    """A metric of the user's own that is not known to take probabilities is refused by its name."""
    member = network(1, None, None)
    made = metric if metric is of_logits else metric()
    member.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), metrics=[made])

    with pytest.raises(ConfigError, match='the metric "of_logits" of the members is for their logits'):
        Ensemble([member], voting="hard")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_spread_of_large_numbers_is_finite(dtype):
    """The standard deviation of numbers whose squares are no float16 is finite in any dtype."""
    parts = [keras.ops.cast([[1000.0, 60000.0]], dtype), keras.ops.cast([[-1000.0, 60000.0]], dtype)]
    found = Spread([0.5, 0.5], dtype=dtype)(parts)

    assert dtype == keras.backend.standardize_dtype(found.dtype)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(keras.ops.cast(found, "float32")), [[1000, 0]])


def test_the_most_votes_win(three):
    """A hard vote returns the share of votes of each class."""
    ensemble = Ensemble(three, voting="hard")
    expected = np.eye(3)[outputs(three).argmax(axis=-1)].mean(axis=0)

    np.testing.assert_allclose(predict(ensemble.model), expected, rtol=1e-6)


def test_the_spread_is_a_second_output(three):
    """With spread the model returns the members' standard deviation beside the same prediction."""
    plain, found = Ensemble(three), predict(Ensemble(three, spread=True).model)

    assert {"prediction", "uncertainty"} == set(found)
    assert np.array_equal(predict(plain.model), found["prediction"])
    np.testing.assert_allclose(found["uncertainty"], outputs(three).std(axis=0), rtol=1e-3, atol=1e-6)


def several(order):
    """Return a model of two named inputs, in a given order."""
    inputs = {name: keras.Input((2,), name=name) for name in order}
    merged = layers.Concatenate()([inputs["left"], inputs["right"]])
    return keras.Model(inputs, layers.Dense(1)(merged))


def test_several_inputs_keep_their_names():
    """Members with a dict of inputs get each input by its name, whatever the order in the dict."""
    members = [several(["left", "right"]), several(["right", "left"])]
    x = {"left": X[:, :2], "right": X[:, 2:4]}
    expected = np.mean([predict(model, x) for model in members], axis=0)

    np.testing.assert_allclose(predict(Ensemble(members).model, x), expected, rtol=1e-5, atol=1e-6)


def test_an_ensemble_may_be_a_member(three):
    """An ensemble of ensembles combines their predictions."""
    pair, single = Ensemble(three[:2]), three[2]
    expected = outputs([pair.model, single]).mean(axis=0)

    np.testing.assert_allclose(predict(Ensemble([pair.model, single]).model), expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"spread": True}, {"voting": "hard", "weights": [1, 2, 3]}])
def test_a_loaded_ensemble_is_the_same(three, tmp_path, options):
    """A loaded ensemble has the same settings, and the same loss."""
    ensemble, path = Ensemble(three, **options), str(tmp_path / "three.keras")
    ensemble.save(path)
    loaded = Ensemble.load(path)

    assert repr(ensemble) == repr(loaded)
    assert str(predict(ensemble.model)) == str(predict(loaded.model))
    assert ensemble.model.loss == loaded.model.loss
    with pytest.raises(FileExistsError):
        loaded.save(path)


@pytest.mark.whole
@pytest.mark.parametrize("load", ["Ensemble.load({!r})", "load_spark_model({!r})"])
def test_another_process_predicts_the_same_bits(three, tmp_path, load):
    """An ensemble that another process loads makes the same predictions, bit for bit."""
    ensemble, path = Ensemble(three, weights=[3, 2, 1], spread=True), str(tmp_path / "three.keras")
    ensemble.save(path)
    np.save(tmp_path / "x.npy", X)
    code = (
        f"import numpy as np; from sparkdl import Ensemble, load_spark_model; m = {load.format(path)}.model\n"
        f"found = m.predict(np.load({str(tmp_path / 'x.npy')!r}), verbose=0)\n"
        f"np.savez({str(tmp_path / 'found.npz')!r}, **found)"
    )
    root = Path(sparkdl.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr

    found = np.load(tmp_path / "found.npz")
    for name, array in ensemble.model.predict(X, verbose=0).items():
        assert array.tobytes() == found[name].tobytes()


def test_a_plain_model_is_not_an_ensemble(three, tmp_path):
    """A file of a plain model is refused, and the error names the function that loads it."""
    SparkModel(three[0]).save(str(tmp_path / "one.keras"))
    with pytest.raises(ModelError, match='"network" is not an ensemble: .* Use sparkdl.load_spark_model'):
        Ensemble.load(str(tmp_path / "one.keras"))


def subclassed():
    class Own(keras.Model):
        def call(self, x):
            return x

    return Own()


def with_own_call():
    class Scaled(keras.Model):
        def call(self, *args, **options):
            return 2 * super().call(*args, **options)

    inputs = keras.Input((6,))
    return Scaled(inputs, layers.Dense(3)(inputs))


def two_outputs():
    inputs = keras.Input((6,))
    return keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)])


@pytest.mark.parametrize(
    ("models", "options", "error", "message"),
    [
        (list, {}, ConfigError, r"models should be a list or a tuple with at least one element; got \[\]"),
        (lambda: network(), {}, ConfigError, "with at least one element; got <Sequential"),
        (lambda: [network(), 3], {}, ModelError, "model should be a keras.Model; got int"),
        (
            lambda: [network(), network(4, name="wide")],
            {},
            ModelError,
            r'same output: member 0 \("network"\) has \(3,\) float32, and member 1 \("wide"\) has \(4,\)',
        ),
        (
            lambda: [network(), network(inputs=5)],
            {},
            ModelError,
            r"same inputs: member 0 .* has \(6,\) float32, and member 1 .* has \(5,\) float32",
        ),
        (lambda: [network(), several(["left", "right"])], {}, ModelError, r"has 'left' \(2,\) float32"),
        (lambda: [two_outputs()], {}, ModelError, "should have one output; the model .* has 2: a, b"),
        (lambda: [subclassed()], {}, ModelError, "The inputs of the model .* are not known"),
        (lambda: [with_own_call()], {}, ModelError, "has its own call method"),
        (lambda: [network()], {"voting": "most"}, ConfigError, "voting should be one of 'soft', 'hard'"),
        (lambda: [network()], {"spread": 1}, ConfigError, "spread should be True or False; got 1"),
        (lambda: [network()], {"weights": [1, 2]}, ConfigError, "a number for each of the 1 members; got 2"),
        (lambda: [network()], {"weights": [-1]}, ConfigError, "finite numbers of at least 0"),
        (lambda: [network()], {"weights": [0.0]}, ConfigError, "not all of them 0"),
        (lambda: [network()], {"weights": [float("nan")]}, ConfigError, "finite numbers of at least 0"),
        (lambda: [network()], {"weights": ["1"]}, ConfigError, "finite numbers of at least 0"),
        (lambda: [network(1, None, "mse")], {"voting": "hard"}, ConfigError, 'voting="hard" needs members'),
        (lambda: [network(loss=None)], {"voting": "hard"}, ConfigError, "has a loss of None and an output"),
    ],
)
def test_what_cannot_be_combined_is_refused(models, options, error, message):
    """The error for mismatched members or settings out of range has the value received."""
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        Ensemble(models(), **options)


def test_members_without_a_loss_are_not_evaluated(three):
    """Evaluation and stacking are refused, before a job starts, if no member was compiled with a loss."""
    ensemble = Ensemble([network(loss=None)])
    for call, name in ((ensemble.evaluate, "evaluate"), (ensemble.stack, "stack")):
        with pytest.raises(ModelError, match=f"{name} needs a loss; none of the members"):
            call(X, Y)
    with pytest.raises(ConfigError, match='stack needs voting="soft"'):
        Ensemble(three, voting="hard").stack(X, Y)


class Threads:
    """A Spark application without Spark."""

    def thread(self, target, name):
        return threading.Thread(target=target, name=name, daemon=True)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("place", [0, 3])
def test_a_member_whose_fit_ends_in_any_error_ends_all(kind, place):
    """An exception of any kind in the fit of one member is raised, and no other member is trained then."""

    def call(number):
        if number == place:
            raise kind("reason")
        return number

    calls = [partial(call, number) for number in range(4)]
    with pytest.raises(kind, match="reason") as raised:
        side_by_side(Threads(), calls, 2, lambda: None)

    assert [f"Member {place} of the ensemble failed, so no member was trained further."] == (
        raised.value.__notes__
    )
    calls[place] = partial(call, 5)
    assert [5 if number == place else number for number in range(4)] == (
        side_by_side(Threads(), calls, 2, lambda: None)
    )


def test_members_are_trained_with_the_policy_of_the_caller():
    """Keras keeps the default dtype policy by thread; the threads of members have that of their caller."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        found = side_by_side(Threads(), [lambda: keras.config.dtype_policy().name] * 2, 2, lambda: None)
    finally:
        keras.config.set_dtype_policy(before)

    assert ["mixed_bfloat16"] * 2 == found


def test_a_seed_determines_the_initial_weights():
    """The same seed gives the same initial weights, and another seed gives different weights."""
    first, again, other = (built(network, seed).get_weights()[0] for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_bootstrap_sample_keeps_rows_together():
    """A bootstrap sample has as many rows, some of them twice, and each keeps its label and weight."""
    rows = TrainingRows({"a": X, "b": (X * 2, X * 3)}, Y, np.arange(len(Y)))
    sample = resampled(rows, seed=3)
    places = sample.sample_weight

    assert len(Y) == len(places) > len(set(places))
    assert np.array_equal(X[places], sample.x["a"])
    assert np.array_equal(3 * X[places], sample.x["b"][1])
    assert np.array_equal(Y[places], sample.y)


def sparse_kinds():
    """Return functions that make a sparse matrix from an array, by the kind of the matrix."""
    import scipy.sparse
    import tensorflow

    kinds = {kind: partial(getattr(scipy.sparse, kind)) for kind in ("csr_matrix", "coo_array", "lil_matrix")}
    return kinds | {"SparseTensor": tensorflow.sparse.from_dense}


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("kind", ["csr_matrix", "coo_array", "lil_matrix", "SparseTensor"])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_sparse_matrices_are_sampled_and_divided(kind, nested):
    """Sparse matrices are resampled and divided into folds as arrays are."""
    dense = np.where(X > 0.5, X, 0)
    made = sparse_kinds()[kind](dense)
    rows = TrainingRows({"a": made} if nested else made, Y, np.arange(len(Y)))
    require_samples(rows, "bootstrap=True")

    def matches(part):
        found = part.x["a"] if nested else part.x
        assert type(found) is type(made) or kind != "SparseTensor"
        return np.array_equal(as_rows(found, "x").toarray(), dense[part.sample_weight])

    assert len(Y) == count_of(rows)
    assert matches(resampled(rows, seed=3))
    assert all(matches(part) for pair in folds_of(rows, 3, seed=3) for part in pair)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_members": 0}, "num_members should be a whole number of at least 1; got 0"),
        ({"seed": -1}, "seed should be a whole number of at least 0; got -1"),
        ({"bootstrap": 2}, "bootstrap should be True or False; got 2"),
        ({"voting": "loud"}, "voting should be one of 'soft', 'hard'; got 'loud'"),
        ({"checkpoint": "runs"}, "checkpoint is for one fit; got an ensemble of 5 fits"),
        ({"settings": {"num_workers": None}}, "num_workers should be a whole number"),
        ({"x": lambda worker, workers: X, "bootstrap": True}, "an RDD or a DataFrame; got a function"),
    ],
)
def test_settings_of_a_fit_are_checked_before_a_model_is_built(options, message):
    """Invalid arguments of Ensemble.fit are refused before a model is built or Spark is started."""
    with pytest.raises(ConfigError, match=message):
        Ensemble.fit(lambda: pytest.fail("built"), **({"x": X, "y": Y} | options))
