"""Metrics of several workers merge exactly if states can be added or merged, else by a reported mean."""

import collections
import inspect

import keras
import numpy as np
import pytest

from sparkdl.driver.epochs import Metrics
from sparkdl.modeling import keras_metrics, keras_variables
from sparkdl.modeling.object_pickling import copied

SHARES = ((0, 3), (3, 10), (10, 20))


class Largest(keras.metrics.Metric):
    """A metric of the largest error so far, whose states cannot be added."""

    def __init__(self, name="largest", **settings):
        super().__init__(name=name, **settings)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.value.assign(keras.ops.maximum(self.value, error))

    def result(self):
        return self.value


class MergedLargest(Largest):
    """A metric of the largest error so far, with a method to merge states."""

    def merge_state(self, metrics):
        for metric in metrics:
            self.value.assign(keras.ops.maximum(self.value, metric.value))


class MergedParts(MergedLargest):
    """A metric with collections of every kind that Keras tracks."""

    def __init__(self, name="parts", **settings):
        super().__init__(name=name, **settings)
        self.more = [self.add_weight(name="a", initializer="zeros"), {"b": (keras.Variable(0.0), "text")}]
        self.means = [keras.metrics.Mean(), keras.metrics.Mean()]
        self.sorted = collections.OrderedDict(z=1, a=[2])
        self.names = {"one", "two"}


class Total(Largest):
    """A metric of the sum of all errors, whose states can be added."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))


def rows():
    generator = np.random.default_rng(0)
    return (generator.normal(size=(20, width)).astype(np.float32) for width in (3, 1))


def merged(metric):
    """Return the merged results of three workers, those of all rows at once, and each worker's own."""
    x, y = rows()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", metric])
    together = Metrics(model, y[:1], keras_metrics.build_metrics(model, x[:1], y[:1]))
    states, apart = [], []
    for start, stop in SHARES:
        apart.append(model.evaluate(x[start:stop], y[start:stop], verbose=0, return_dict=True))
        states.append(together.layout.to_bytes(keras_variables.read(together.variables)))
    whole = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    return together.merge([*states, b""]), whole, apart


class LargestOfNegatives(Largest):
    """The largest prediction for rows of label 0; a row of label 1 does not change it."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = keras.ops.max(keras.ops.where(y_true < 0.5, y_pred, 0.0))
        self.value.assign(keras.ops.maximum(self.value, found))


class CountOfNegatives(Largest):
    """The number of rows of label 0, whose states can be added."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(keras.ops.sum(keras.ops.cast(y_true < 0.5, "float32")))


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("prediction", [0.0, 0.7])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Largest, False), (LargestOfNegatives, False), (CountOfNegatives, True), (Total, True)],
)
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_the_first_row_does_not_decide_whether_states_add_up(label, prediction, kind, expected, dtype):
    """A metric is measured on more labels and predictions than those of the first row, which may hide it."""
    sample = np.array([[label]], dtype), keras.ops.convert_to_tensor(np.array([[prediction]], "float32"))

    assert expected == keras_metrics.adds_up(kind(), [sample])


@pytest.mark.parametrize("kind", [Total, MergedLargest, MergedParts])
def test_a_metric_of_the_users_is_exact_where_it_can_be(kind, caplog):
    """A custom metric is exact if its states add up, as a trial on the driver shows, or it merges them."""
    ours, whole, _ = merged(kind())

    assert whole == pytest.approx(ours, rel=1e-5)
    assert not [record for record in caplog.records if record.name.startswith("sparkdl")]


@pytest.mark.parametrize("kind", [Largest, MergedLargest])
def test_a_metric_of_one_of_several_outputs(kind):
    """A custom metric of one output replaces the result that Keras reports for it."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")})
    model.compile("sgd", {"a": "mse", "b": "mse"}, metrics={"b": [kind(), "mae"]})
    x, y = rows()
    labels = {"a": y, "b": 2 * y}
    first = {name: part[:1] for name, part in labels.items()}
    together = Metrics(model, first, keras_metrics.build_metrics(model, x[:1], first))
    states, apart = [], []
    for start, stop in SHARES:
        part = {name: label[start:stop] for name, label in labels.items()}
        apart.append(model.evaluate(x[start:stop], part, verbose=0, return_dict=True))
        states.append(together.layout.to_bytes(keras_variables.read(together.variables)))
    whole = model.evaluate(x, labels, batch_size=20, verbose=0, return_dict=True)
    ours = together.merge(states)

    largest = [each["b_largest"] for each in apart]
    counts = [stop - start for start, stop in SHARES]
    expected = max(largest) if kind is MergedLargest else np.average(largest, weights=counts)
    assert whole.keys() == ours.keys()
    assert expected == pytest.approx(ours["b_largest"], rel=1e-5)
    assert whole["b_mae"] == pytest.approx(ours["b_mae"], rel=1e-5)


def test_a_metric_that_cannot_be_merged_is_a_mean_and_says_so(caplog):
    """A metric that cannot be merged is a mean by rows, with a warning; other metrics stay exact."""
    ours, whole, apart = merged(Largest())
    mean = np.average([each["largest"] for each in apart], weights=[stop - start for start, stop in SHARES])

    assert mean == pytest.approx(ours.pop("largest"), rel=1e-5)
    assert whole["largest"] > mean
    assert {name: whole[name] for name in ("loss", "mae")} == pytest.approx(ours, rel=1e-5)
    assert any(message.startswith("largest: ") and "merge_state" in message for message in caplog.messages)


@pytest.mark.parametrize("shares", [[(0, 20)], [(0, 3), (3, 10), (10, 20)], [(k, k + 1) for k in range(20)]])
@pytest.mark.parametrize("outputs", [1, 2])
def test_summed_losses_do_not_depend_on_the_partitions(shares, outputs):
    """A loss that is a sum over a batch is reported as for batches of all rows; others are unchanged."""
    inputs, size = keras.Input((3,)), 8
    names = ["a", "b"][:outputs]
    model = keras.Model(
        inputs, {name: keras.layers.Dense(1, use_bias=False, name=name)(inputs) for name in names}
    )
    summed = {name: keras.losses.MeanSquaredError(reduction="sum") for name in names}
    model.compile("sgd", summed, metrics=dict.fromkeys(names, "mae"))
    x = np.ones((20, 3), np.float32)
    y = {name: np.ones((20, 1), np.float32) for name in names}
    first = {name: label[:1] for name, label in y.items()}
    together = Metrics(model, first, keras_metrics.build_metrics(model, x[:1], first))
    states, whole = [], model.evaluate(x, y, batch_size=size, verbose=0, return_dict=True)
    for start, stop in shares:
        part = {name: label[start:stop] for name, label in y.items()}
        model.evaluate(x[start:stop], part, batch_size=size, verbose=0)
        states.append(together.layout.to_bytes(keras_variables.read(together.variables)))
    ours = together.merge_tests(states, [stop - start for start, stop in shares], size)

    assert whole == pytest.approx(ours, rel=1e-5)


ARGUMENTS = [
    {},
    {"num_classes": 3},
    {"num_classes": 3, "target_class_ids": [1]},
    *({name: 0.5} for name in ("recall", "precision", "sensitivity", "specificity")),
]
LABELS = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], "float32")
SCORES = np.array([[0.2, 0.8], [0.4, 0.6], [0.9, 0.1]], "float32")


def metric_of(kind):
    """Return a metric of Keras, made with the arguments that its class needs."""
    for arguments in ARGUMENTS:
        try:
            return kind(**arguments)
        except (TypeError, ValueError):
            continue
    return pytest.fail(f"{kind.__name__} needs other arguments")


def metrics_of_keras():
    """Return the class of each metric of Keras, but not the base classes."""
    bases = keras.metrics.Metric, keras.metrics.MeanMetricWrapper
    found = (getattr(keras.metrics, name) for name in sorted(dir(keras.metrics)))
    kinds = [each for each in found if inspect.isclass(each) and issubclass(each, keras.metrics.Metric)]
    return [each for each in dict.fromkeys(kinds) if each not in bases]


def result_of(metric):
    """Return the results of a metric after another update with a few rows."""
    if type(metric) in (keras.metrics.Mean, keras.metrics.Sum):
        metric.update_state(SCORES)
    else:
        of_classes = "Sparse" in type(metric).__name__ or hasattr(metric, "num_classes")
        labels = LABELS[:, 0].astype("int32") if of_classes else LABELS
        if "OneHot" in type(metric).__name__:
            labels = np.eye(3)[labels]
        metric.update_state(labels, labels if hasattr(metric, "num_classes") else SCORES)
    return np.asarray(metric.result()).tolist()


OWN = [lambda: keras.metrics.BinaryCrossentropy(from_logits=True), MergedParts]


@pytest.mark.parametrize("kind", [*metrics_of_keras(), *OWN], ids=lambda kind: kind.__name__)
def test_a_copy_of_a_metric_computes_the_same(kind):
    """A copy of a metric has the same state, and neither the copy nor the original changes the other."""
    metric = metric_of(kind)
    result_of(metric)
    copy = copied(metric)

    assert [each.name for each in metric.variables] == [each.name for each in copy.variables]
    assert {id(each) for each in metric.variables}.isdisjoint(map(id, copy.variables))
    assert result_of(metric) == pytest.approx(result_of(copy), nan_ok=True)
    assert metric.get_config() == copy.get_config()


def test_the_collections_of_a_copied_metric_are_tracked():
    """A variable that is added to a list of a copied metric belongs to the copy."""
    copy = copied(MergedParts())
    count = len(copy.variables)
    copy.more.append(keras.Variable(1.0))
    copy.more[1]["c"] = keras.Variable(2.0)

    assert count + 2 == len(copy.variables)
    assert ({"one", "two"}, ["z", "a"]) == (copy.names, list(copy.sorted))
    assert copy.more[0] is copy.variables[1]
