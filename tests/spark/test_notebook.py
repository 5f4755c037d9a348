"""What a notebook defines in its cells travels to the workers."""

import os
import sys

import pytest

nbformat = pytest.importorskip("nbformat")
nbconvert = pytest.importorskip("nbconvert.preprocessors")

CELLS = """
import keras
import numpy as np
from pyspark.sql import SparkSession
from sparkdl import SparkModel

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
x = np.random.default_rng(0).normal(size=(120, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
# next cell
FACTOR = 0.5

class Scaled(keras.layers.Layer):
    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.dense = keras.layers.Dense(units, "tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs) * FACTOR

    def get_config(self):
        return {**super().get_config(), "units": self.units}

def halved(y_true, y_pred):
    return FACTOR * keras.losses.mean_squared_error(y_true, y_pred)

def make():
    keras.utils.set_random_seed(1)
    double = keras.layers.Lambda(lambda inputs: inputs / FACTOR, output_shape=(4,))
    model = keras.Sequential([keras.Input((4,)), double, Scaled(8), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), halved)
    return model
# next cell
model, reference = make(), make()
spark_model = SparkModel(model, num_workers=2)
history = spark_model.fit(x, y, batch_size=24, epochs=3, shuffle=False, verbose=0)
reference.fit(x, y, batch_size=24, epochs=3, shuffle=False, verbose=0)
predicted = spark_model.predict(x)
spark.stop()
# next cell
for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
np.testing.assert_allclose(predicted, reference.predict(x, verbose=0), atol=1e-4)
print("Trained in", __name__)
"""


@pytest.mark.spark
@pytest.mark.whole
def test_a_layer_a_loss_and_a_lambda_of_a_notebook(tmp_path, monkeypatch):
    """They are of its __main__, which no worker can import: training and predictions are plain Keras's."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.split("# next cell")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbconvert.ExecutePreprocessor(timeout=300).preprocess(notebook, {"metadata": {"path": str(tmp_path)}})

    assert "Trained in __main__\n" == cells[-1].outputs[-1].text
