"""Executors read their rows themselves, by a function that returns each worker's rows."""

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError

MASTERS = ("local", "local-cluster", "standalone")


@pytest.fixture
def files(problem, tmp_path):
    """A folder with the problem's rows, a third of them in each of three pairs of .npy files."""
    for index, rows in enumerate(np.array_split(np.arange(203), 3)):
        np.save(tmp_path / f"x{index}.npy", problem.x[rows])
        np.save(tmp_path / f"y{index}.npy", problem.y[rows])
    return str(tmp_path)


def reader(folder, kind):
    """Return a function that reads a worker's share of the files in one of the forms that Keras takes."""

    def read(worker, num_workers):
        import numpy

        pairs = [
            tuple(numpy.load(f"{folder}/{name}{index}.npy", mmap_mode="r") for name in "xy")
            for index in range(worker, 3, num_workers)
        ]
        if kind == "batches":
            return iter(pairs)
        x, y = (numpy.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        if kind == "dataset":
            import tensorflow

            return tensorflow.data.Dataset.from_tensor_slices((x, y)).batch(7)
        if kind == "sequence":
            import keras

            class Sequence(keras.utils.PyDataset):
                def __len__(self):
                    return -(-len(x) // 10)

                def __getitem__(self, index):
                    return x[10 * index :][:10], y[10 * index :][:10]

            return Sequence()
        return x, y

    return read


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["arrays", "batches", "dataset", "sequence"])
def test_workers_train_on_what_a_function_returns_there(spark, problem, files, kind):
    """Arrays, a generator, tf.data and a PyDataset give the same rows, and train as an RDD of them does."""
    model, alike = problem.model(), problem.model()
    spark_model = SparkModel(model, num_workers=2)

    history = spark_model.fit(reader(files, kind), batch_size=16, epochs=3, verbose=0, shuffle=False)

    thirds = np.array_split(np.arange(203), 3)
    parts = [np.concatenate([thirds[0], thirds[2]]), thirds[1]]
    pairs = [[(problem.x[row], problem.y[row]) for row in part] for part in parts]
    rdd = spark.sparkContext.parallelize(pairs, 2).flatMap(lambda part: part)
    SparkModel(alike, num_workers=2).fit(rdd, batch_size=16, epochs=3, verbose=0, shuffle=False)
    assert [len(part) for part in parts] == history.training["worker_rows"]
    for one, other in zip(model.get_weights(), alike.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_what_a_function_returns_is_validated_and_evaluated(spark, problem, files, mode):
    """A function's rows are validated by another function or a held-out part; `evaluate` takes one too."""
    model = problem.model()
    spark_model = SparkModel(model, mode=mode, num_workers=2)
    held = reader(files, "batches")

    history = spark_model.fit(
        reader(files, "arrays"), batch_size=16, epochs=2, verbose=0, validation_data=held, seed=1
    )
    loss, accuracy = spark_model.evaluate(held)
    expected = model.evaluate(problem.x, problem.y, verbose=0)
    split = spark_model.fit(reader(files, "arrays"), verbose=0, validation_split=0.2, seed=1)

    assert expected == pytest.approx([loss, accuracy], rel=1e-4)
    if mode == "synchronous":
        assert loss == pytest.approx(history.history["val_loss"][-1], rel=1e-4)
    assert 150 < split.training["rows"] < 180


@pytest.mark.whole
def test_parquet_is_read_on_executors_as_in_the_docs(spark, problem, frames, tmp_path):
    """The function of docs/how-to/data.md reads Parquet row groups with pyarrow, without Spark."""
    folder = str(tmp_path / "visits")
    frames["array"].select("features", "label").repartition(3).write.parquet(folder)

    def rows(worker, num_workers):
        import glob

        import numpy
        import pyarrow.parquet

        for path in sorted(glob.glob(f"{folder}/*.parquet"))[worker::num_workers]:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=["features", "label"]):
                features, label = batch.columns
                yield numpy.stack(features.to_numpy(zero_copy_only=False)), label.to_numpy()

    history = SparkModel(problem.model(), num_workers=2).fit(rows, epochs=2, verbose=0, seed=1)

    assert 203 == sum(history.training["worker_rows"])
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_several_inputs_and_weights_come_from_a_function(spark, problem):
    """A function may return structures and sample weights, as in `fit` of arrays."""
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    out = keras.layers.Dense(3, activation="softmax")(keras.layers.concatenate([left, right]))
    model = keras.Model({"left": left, "right": right}, out)
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = problem.x, problem.y

    def rows(worker, num_workers):
        mine = slice(worker, None, num_workers)
        return {"left": x[mine, :4], "right": x[mine, 4:]}, y[mine], (y[mine] > 0).astype("float32")

    history = SparkModel(model, num_workers=2).fit(rows, epochs=2, verbose=0, seed=1)

    assert history.history["loss"][-1] < history.history["loss"][0]


@pytest.mark.whole
def test_what_a_function_does_wrong_is_named(spark, problem):
    """Wrong arguments, unequal lengths, another row shape and exceptions of a function raise named errors."""
    x, y = problem.x, problem.y
    spark_model = SparkModel(problem.model(), num_workers=2)

    def uneven(worker, num_workers):
        return iter([(x[:9], y[:9]), (x[:9], y[:8])])

    def misshapen(worker, num_workers):
        return (x, y) if worker == 0 else (x[:, :5], y)

    def broken(worker, num_workers):
        raise LookupError("no such file")

    with pytest.raises(ConfigError, match="should take two arguments, the index of a worker"):
        spark_model.fit(max)  # has no signature
    with pytest.raises(ConfigError, match="should take two arguments, the index of a worker"):
        spark_model.fit(lambda: (x, y))
    with pytest.raises(ConfigError, match="^y should be left out if x is a function; got both. Return y"):
        spark_model.fit(uneven, y)
    with pytest.raises(ConfigError, match="^y and sample_weight should be left out if x is a function"):
        spark_model.fit(uneven, y, sample_weight=y)
    with pytest.raises(ConfigError, match="validation_data should be a function"):
        spark_model.fit(uneven, validation_data=(x, y))
    with pytest.raises(ConfigError, match="^x should be NumPy arrays or pandas, an RDD of x or of"):
        spark_model.predict(uneven)
    with pytest.raises(DataError, match=r"return a tuple of arrays \(x, y\) .*; got ndarray of ndarray"):
        spark_model.fit(lambda worker, num_workers: x, verbose=0)
    with pytest.raises(DataError, match=r"equal numbers of rows; worker \d has x 9, y 8 after row 9"):
        spark_model.fit(uneven, verbose=0)
    with pytest.raises(DataError, match=r"Expected x of shape \(6,\); row 0 of worker 1 has shape \(5,\)"):
        spark_model.fit(misshapen, verbose=0)
    with pytest.raises(DataError, match="could not be computed: .*no such file"):
        spark_model.fit(broken, verbose=0)
    with pytest.raises(DataError, match="returned none for worker 0"):
        spark_model.fit(lambda worker, num_workers: (x[:0], y[:0]), verbose=0)
