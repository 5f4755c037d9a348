"""Ensembles are trained, stacked, evaluated and applied on Spark, and their averages are those of NumPy."""

import keras
import numpy as np
import pytest

from sparkdl import Ensemble, SparkModel, predict_udf
from sparkdl.callbacks import AverageWeights
from sparkdl.errors import DataError
from sparkdl.ml import KerasTransformer

FIT = {"epochs": 2, "batch_size": 32}


@pytest.fixture(scope="module")
def ensemble(problem):
    """Three members with different weights, and their spread."""
    return Ensemble([problem.model(seed=seed) for seed in range(3)], weights=[1, 2, 1], spread=True)


@pytest.fixture(scope="module")
def expected(ensemble, problem):
    """The weighted mean and deviation of the members' predictions, by NumPy."""
    found = np.stack([member.predict(problem.x, verbose=0) for member in ensemble.members])
    mean = np.average(found, axis=0, weights=[1, 2, 1])
    return {
        "prediction": mean,
        "uncertainty": np.average((found - mean) ** 2, axis=0, weights=[1, 2, 1]) ** 0.5,
    }


def assert_close(expected, found):
    for name, values in expected.items():
        np.testing.assert_allclose(np.array([row[name] for row in found]), values, rtol=1e-3, atol=1e-6)


def test_predictions_are_the_mean_of_the_members(spark, problem, ensemble, expected):
    """Predictions of arrays, an RDD and a DataFrame are the members' mean and deviation."""
    arrays = ensemble.predict(problem.x)
    rows = ensemble.predict(problem.rdd(spark, 100, 3, 100).keys()).collect()

    for name, values in expected.items():
        np.testing.assert_allclose(arrays[name], values, rtol=1e-3, atol=1e-6)
    assert_close(expected, rows)


def test_columns_have_the_prediction_and_the_uncertainty(frames, ensemble, expected, tmp_path):
    """predict, a UDF and a loaded pipeline stage return a struct of the prediction and the uncertainty."""
    frame = frames["array"].coalesce(1)
    KerasTransformer(model=ensemble.model).save(str(tmp_path / "stage"))
    stage = KerasTransformer.load(str(tmp_path / "stage"))
    for given in (
        ensemble.predict(frame),
        frame.withColumn("prediction", predict_udf(ensemble.model)("features")),
        stage.transform(frame),
    ):
        rows = given.orderBy("row").select("prediction.*").collect()
        assert_close(expected, rows)


def test_a_transformer_of_an_ensemble_classifies(frames, problem):
    """An ensemble of classifiers has the columns of a classifier in a pipeline."""
    ensemble = Ensemble([problem.model(seed=seed) for seed in range(2)])
    rows = KerasTransformer(model=ensemble.model).transform(frames["array"]).orderBy("row").collect()
    expected = np.mean([member.predict(problem.x, verbose=0) for member in ensemble.members], axis=0)

    np.testing.assert_allclose([row.probability.toArray() for row in rows], expected, rtol=1e-4, atol=1e-6)
    assert expected.argmax(axis=1).tolist() == [row.prediction for row in rows]


def test_an_evaluation_is_that_of_keras(spark, problem, ensemble):
    """An evaluation returns the loss and the metrics of the prediction, with or without spread."""
    mean = Ensemble(ensemble.members, weights=ensemble.weights)
    loss, accuracy = ensemble.evaluate(problem.x, problem.y)
    predicted = mean.model.predict(problem.x, verbose=0)
    rows = np.arange(len(problem.y))

    assert pytest.approx(-np.log(predicted[rows, problem.y]).mean(), rel=1e-4) == loss
    assert pytest.approx((predicted.argmax(axis=1) == problem.y).mean()) == accuracy


def network():
    """Return the problem's network, with initial weights that its builder does not seed."""
    layers = [
        keras.Input((6,), name="points"),
        keras.layers.Dense(12, activation="tanh", name="hidden"),
        keras.layers.Dense(3, activation="softmax", name="class"),
    ]
    model = keras.Sequential(layers, name="network")
    model.compile(
        keras.optimizers.SGD(0.3, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def test_members_are_those_of_fits_with_their_seeds(spark, problem):
    """The same seed gives the same members again, and the members differ from each other."""
    pair = [Ensemble.fit(network, problem.x, problem.y, num_members=2, seed=5, **FIT) for _ in range(2)]
    weights = [[member.get_weights() for member in each.members] for each in pair]

    assert [2, 2] == [len(history.history["loss"]) for history in pair[0].histories]
    for one, other in zip(*weights, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    assert not np.array_equal(weights[0][0][0], weights[0][1][0])


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["frame", "rdd", "arrays"])
def test_bootstrap_members_have_their_own_rows(spark, problem, frames, kind):
    """With bootstrap, members with the same initial weights differ, because their rows differ."""
    data = {
        "frame": (frames["array"],),
        "rdd": (problem.rdd(spark, 100, 3, 100),),
        "arrays": (problem.x, problem.y),
    }[kind]
    ensemble = Ensemble.fit(problem.model, *data, num_members=3, bootstrap=True, seed=0, **FIT, shuffle=False)
    rows = [history.training["rows"] for history in ensemble.histories]

    assert all(150 < count < 260 for count in rows)
    assert kind != "arrays" or [len(problem.x)] * 3 == rows
    first = [member.get_weights()[0] for member in ensemble.members]
    assert not np.array_equal(first[0], first[1])


def test_a_member_that_fails_ends_the_others(spark, problem):
    """The first error of a member is raised, with the number of the member, and the others end early."""
    made = []

    def build():
        made.append(problem.model())
        if len(made) > 1:
            made[-1].add(keras.layers.Dense(2, activation="softmax"))  # labels have three classes
            made[-1].compile("sgd", "sparse_categorical_crossentropy")
        return made[-1]

    with pytest.raises(DataError) as raised:
        Ensemble.fit(build, problem.x, problem.y, num_members=2, epochs=100_000, seed=0)

    assert ["Member 1 of the ensemble failed, so no member was trained further."] == raised.value.__notes__


def test_stacking_is_no_worse_than_the_mean(spark, problem):
    """Learned weights give a better member more weight, and a loss on their rows no worse than the mean's."""
    members = [problem.model(seed=seed) for seed in range(3)]
    members[1].fit(problem.x, problem.y, epochs=5, verbose=0)
    mean = Ensemble(members)
    stacked = mean.stack(problem.x, problem.y, epochs=5, batch_size=32, seed=0)

    assert pytest.approx(1) == sum(stacked.weights)
    assert max(stacked.weights) == stacked.weights[1] > 0.5
    assert stacked.evaluate(problem.x, problem.y)[0] < mean.evaluate(problem.x, problem.y)[0]
    for member, same in zip(mean.members, stacked.members, strict=True):
        assert all(
            np.array_equal(*pair) for pair in zip(member.get_weights(), same.get_weights(), strict=True)
        )


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_workers_evaluate_the_mean_of_the_weights(spark, problem, mode):
    """With AverageWeights the validation results are those of the mean, which the model gets at the end."""
    callback, rate = AverageWeights(start=1), 0.05  # so small that each epoch lowers the loss
    model = problem.model(keras.optimizers.SGD(rate))
    held_out = problem.x[150:], problem.y[150:]
    options = {"epochs": 4, "batch_size": 32, "seed": 0, "verbose": 0}
    history = SparkModel(model, num_workers=2, mode=mode).fit(
        problem.x[:150], problem.y[:150], validation_data=held_out, callbacks=[callback], **options
    )
    assert callback.averaged
    assert pytest.approx(model.evaluate(*held_out, verbose=0)[0], rel=1e-3) == history.history["val_loss"][-1]

    if mode == "synchronous":
        plain, weights = problem.model(keras.optimizers.SGD(rate)), []
        record = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: weights.append(plain.get_weights()))
        SparkModel(plain, num_workers=2).fit(problem.x[:150], problem.y[:150], callbacks=[record], **options)
        for found, expected in zip(model.get_weights(), zip(*weights[1:], strict=True), strict=True):
            np.testing.assert_allclose(found, np.mean(expected, axis=0), rtol=1e-4, atol=1e-5)
