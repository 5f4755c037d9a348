"""The examples run as a reader runs them.

`make examples` runs this file; `make demo` runs demo.py, and `make packed-job` spark_submit_job.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.spark, pytest.mark.whole]


def run(name, *arguments):
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYSPARK_PYTHON", None)  # a reader does not set it
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert 0 == result.returncode, result.stderr[-4000:]
    return result.stdout


def test_elephas_example_runs_with_other_imports():
    """Elephas's own example, with changed imports, trains, evaluates and records its epochs."""
    output = run("from_elephas.py")

    assert "Epochs recorded: 5" in output
    assert float(output.split("Test accuracy:")[1].split()[0]) > 0.6


def test_one_line_trains_on_what_a_pipeline_makes():
    """A DataFrame made by Spark ML's transformers is trained on as it is."""
    output = run("one_line_in_a_pipeline.py")

    assert float(output.rsplit("Accuracy on held-out rows:", 1)[1]) > 0.9


def test_an_estimator_is_chosen_saved_and_loaded():
    """Model selection prefers more epochs, and the loaded model classifies unseen flowers."""
    output = run("estimator_in_a_pipeline.py")

    assert float(output.rsplit("Accuracy on test rows:", 1)[1]) > 0.9


def test_streams_train_and_are_predicted():
    """Training continues with each new file of a stream, and every row gets its prediction."""
    output = run("streams.py")

    assert 4 == output.count(": loss ")
    assert "Rows with their prediction: 2000" in output
    assert float(output.rsplit("Accuracy of the stream:", 1)[1]) > 0.9


@pytest.mark.parametrize(
    ("model", "mode", "frequency"),
    [("mlp", "synchronous", "batch"), ("mlp", "hogwild", "16"), ("cnn", "asynchronous", "epoch")],
)
def test_image_models_train_in_any_mode(model, mode, frequency):
    """Two epochs on the shipped images are enough to classify most of them, in any mode."""
    settings = ["--model", model, "--mode", mode, "--frequency", frequency, "--epochs", "2"]
    output = run("train_images.py", *settings)

    assert float(output.rsplit("did not train on:", 1)[1]) > 0.6


def test_a_regression_is_trained_saved_and_loaded():
    """With noise of 0.3 the mean absolute error is 0.24; an untrained model has 7."""
    output = run("regression.py")

    assert float(output.rsplit("Mean absolute error:", 1)[1]) < 0.5


def test_a_frozen_base_serves_a_new_head():
    """A head trained on other classes' features separates five new classes, and the base stays frozen."""
    output = run("transfer_learning.py")

    assert "The base is as it was: True" in output
    # With five classes chance gives 0.2. Plain Keras reaches between 0.68 and 0.78, depending on the seed.
    assert float(output.rsplit("Accuracy on new garments:", 1)[1]) > 0.6


def test_mlflow_records_a_fit():
    """The run has the parameters, the metrics by epoch, and a model that predicts."""
    pytest.importorskip("mlflow")
    output = run("track_with_mlflow.py")

    assert "'num_workers': '2', 'mode': 'synchronous', 'optimizer_name': 'adam'" in output
    assert 5 == output.count(": val_loss ")
    assert float(output.rsplit("Accuracy of the logged model:", 1)[1]) > 0.9
