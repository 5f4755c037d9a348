"""Columns of image bytes, as from Spark's own sources, are decoded on executors."""

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError
from sparkdl.ml import KerasEstimator

MASTERS = ("local", "local-cluster", "standalone", "connect")
SHAPE = 8, 6, 3
DARK, BRIGHT = 40, 200


def portable(image):
    """Return the bytes of a PPM file: a header and the pixels."""
    height, width, _ = image.shape
    return b"P6 %d %d 255\n" % (width, height) + image.tobytes()


def decode(content):
    """Return the pixels of a PPM file."""
    if not content.startswith(b"P6 "):
        raise ValueError(f"not a PPM file: {content[:9]}")
    head, pixels = content.split(b"\n", 1)
    _, width, height, _ = head.split()
    return np.frombuffer(pixels, "uint8").reshape(int(height), int(width), 3)


@pytest.fixture(scope="module")
def images():
    """Forty images, alternately dark and bright."""
    random = np.random.default_rng(5)
    levels = np.where(np.arange(40) % 2, BRIGHT, DARK)
    return (levels[:, None, None, None] + random.integers(0, 50, (40, *SHAPE))).astype("uint8")


@pytest.fixture
def folder(images, tmp_path):
    """A folder with one folder of dark and one of bright images."""
    for index, image in enumerate(images):
        place = tmp_path / ("bright" if index % 2 else "dark")
        place.mkdir(exist_ok=True)
        (place / f"{index:02d}.ppm").write_bytes(portable(image))
    return tmp_path


def model_of():
    keras.utils.set_random_seed(2)
    layers = [
        keras.Input(SHAPE, name="pixels"),
        keras.layers.Rescaling(1 / 64, offset=-2),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1, activation="sigmoid", name="bright"),
    ]
    model = keras.Sequential(layers, name="light")
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["accuracy"])
    return model


def read(spark, folder):
    files = spark.read.format("binaryFile").option("recursiveFileLookup", True).load(str(folder))
    return files.selectExpr("path", "content", "cast(path LIKE '%/bright/%' AS int) AS label")


@pytest.mark.whole
def test_images_of_files_are_trained_on_as_their_arrays_are(spark, images, folder):
    """Decoded files give the weights that their arrays give in the same order; evaluate and predict agree."""
    model, alike = model_of(), model_of()
    frame, columns = read(spark, folder), {"features_col": "content", "decode": {"content": decode}}
    order = [int(row.path[-6:-4]) for row in frame.select("path").collect()]
    spark_model = SparkModel(model, num_workers=1)

    spark_model.fit(frame, batch_size=8, epochs=3, verbose=0, shuffle=False, **columns)
    loss, accuracy = spark_model.evaluate(frame, **columns)
    rows = spark_model.predict(frame, **columns).select("path", "prediction").collect()

    alike.fit(images[order], np.array(order) % 2, batch_size=8, epochs=3, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), alike.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    expected = alike.evaluate(images, np.arange(40) % 2, verbose=0)
    assert expected == pytest.approx([loss, accuracy], rel=1e-3)
    found = {int(row.path[-6:-4]): row.prediction for row in rows}
    np.testing.assert_allclose(
        alike.predict(images, verbose=0)[:, 0], [found[k] for k in range(40)], atol=1e-4
    )


@pytest.mark.whole
def test_structs_of_images_are_decoded_by_stages_of_a_pipeline(spark, images):
    """A pipeline stage with a decode Param takes the structs of Spark's image source as dicts."""
    rows = [((SHAPE[0], SHAPE[1], image.tobytes()), k % 2, k % 5 == 0) for k, image in enumerate(images)]
    kind = "image struct<height: int, width: int, data: binary>, label int, held boolean"
    frame = spark.createDataFrame(rows, kind)

    def pixels(image):
        return np.frombuffer(image["data"], "uint8").reshape(image["height"], image["width"], 3)

    estimator = KerasEstimator(
        model=model_of(),
        featuresCol="image",
        decode={"image": pixels},
        numWorkers=2,
        epochs=8,
        batchSize=8,
        validationIndicatorCol="held",
        seed=1,
    )
    fitted = estimator.fit(frame)
    found = fitted.transform(frame).select("prediction").collect()

    assert 32 == fitted.summary.training["rows"]
    assert fitted.summary.history["val_accuracy"][-1] > 0.9
    assert [k % 2 for k in range(40)] == [row.prediction for row in found]


@pytest.mark.whole
def test_what_cannot_be_decoded_is_named(spark, images):
    """A value that cannot be decoded is named: on the driver for the first row, else with its row."""
    spark_model = SparkModel(model_of(), num_workers=2)

    def frame_of(*contents):
        rows = [(content, 1) for content in contents]
        return spark.createDataFrame(rows, "content binary, label int").coalesce(1)

    def fit(frame, **arguments):
        columns = {"features_col": "content", "decode": {"content": decode}}
        spark_model.fit(frame, verbose=0, **{**columns, **arguments})

    good = portable(images[0])
    transposed = portable(np.swapaxes(images[0], 0, 1))
    cases = [
        (frame_of(b"GIF89a", good), r"decodes content failed on the first row: ValueError: not a PPM file"),
        (frame_of(transposed, good), r"rows of shape \(8, 6, 3\); content has rows of shape \(6, 8, 3\)"),
        (frame_of(good, good, b"GIF89a"), r"content failed on row 2 of partition 0: ValueError: not a PPM"),
        (frame_of(good, transposed), r"the decoded row 1 of partition 0 has shape \(6, 8, 3\)"),
        (frame_of(good, None), "Expected no nulls in content; row 1 of partition 0"),
    ]
    for frame, message in cases:
        with pytest.raises(DataError, match=message):
            fit(frame)
    refused = [
        ({"decode": None}, "it holds binary. Pass decode="),
        ({"decode": {"contents": decode}}, "functions for 'contents', but the columns .* 'content'"),
        ({"decode": [decode]}, "decode should be a dict from column name to function"),
        ({"decode": {0: decode}}, "decode should be a dict from column name to function"),
    ]
    for arguments, message in refused:
        with pytest.raises(ConfigError, match=message):
            fit(frame_of(good), **arguments)
    with pytest.raises(ConfigError, match="decode needs rows in a DataFrame"):
        spark_model.fit(images, np.ones(40), decode={"content": decode})


def test_a_text_is_decoded_too_and_large_batches_in_parts(spark):
    """A decode function takes any value; large batches are decoded in parts to fit into memory."""
    model = keras.Sequential([keras.Input((200_000,)), keras.layers.Dense(1, kernel_initializer="ones")])
    frame = spark.range(12).selectExpr("cast(id AS string) AS name").coalesce(1)

    predicted = SparkModel(compiled(model)).predict(
        frame, features_col="name", decode={"name": lambda name: np.full(200_000, int(name), "float32")}
    )

    expected = [200_000.0 * k for k in range(12)]
    np.testing.assert_allclose(expected, [row.prediction for row in predicted.collect()], rtol=1e-5)


def compiled(model):
    model.compile("sgd", "mse")
    return model


def test_the_driver_and_executors_give_a_function_the_same(spark):
    """A decode function gets bytes and dicts, on the driver as on executors."""
    frame = spark.sql("SELECT named_struct('data', X'0102', 'rows', array(1, 2)) AS image, 1 AS label")

    def first(image):
        if type(image) is not dict or type(image["data"]) is not bytes or type(image["rows"]) is not list:
            raise TypeError(f"{image!r}")
        return np.frombuffer(image["data"], "uint8").astype("float32")

    model = compiled(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    SparkModel(model, num_workers=1).fit(frame, features_col="image", decode={"image": first}, verbose=0)
