"""Stages, models and checkpoints of earlier versions are loaded; ``written_by_earlier_versions`` has them."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from written_by_earlier_versions.write import FIT, RUNS, frame_of, model_of, rows

from sparkdl import SparkModel, load_spark_model
from sparkdl.ml import KerasEstimator, KerasEstimatorModel

FOLDERS = sorted((Path(__file__).parents[1] / "written_by_earlier_versions").glob("*/results.json"))


@pytest.fixture(params=[path.parent for path in FOLDERS], ids=lambda folder: folder.name)
def written(request):
    """The folder of a version, with its results."""
    return request.param, json.loads((request.param / "results.json").read_text())


def test_a_saved_model_is_loaded_with_its_settings(spark, written):
    """A SparkModel that an earlier version saved has the same settings and predictions."""
    folder, results = written

    loaded = load_spark_model(str(folder / "model.keras"))

    settings = json.loads((folder / "model.json").read_text())
    assert settings.items() <= loaded.config.to_dict().items()
    np.testing.assert_allclose(loaded.predict(rows()[0][:3]), results["model.keras"], rtol=1e-4)


def test_saved_stages_are_loaded_with_their_params(spark, written):
    """Pipeline stages that an earlier version saved have the same Params, history and predictions."""
    folder, results = written

    estimator = KerasEstimator.load(str(folder / "estimator"))
    fitted = KerasEstimatorModel.load(str(folder / "fitted"))

    for stage in (estimator, fitted):
        assert (2, 2, "fedopt") == (stage.getNumWorkers(), stage.getFrequency(), stage.getMerge())
        assert (2, 3, {0: 2.0}) == (stage.getBatchSize(), stage.getSeed(), stage.getClassWeight())
    assert [1, 1] == [len(values) for values in fitted.summary.history.values()]
    found = fitted.transform(frame_of(spark).limit(3)).collect()
    np.testing.assert_allclose([row.probability for row in found], results["fitted"], rtol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_from_a_checkpoint(spark, written, tmp_path, caplog, name):
    """A run that an earlier version began ends with the losses that it had there, except without rounds."""
    caplog.set_level(logging.INFO, "sparkdl")
    folder, results = written
    checkpoint = shutil.copytree(folder / "checkpoints" / name, tmp_path / "checkpoints")
    trainer = SparkModel(model_of(), **RUNS[name][0])

    history = trainer.fit(*rows(), **FIT, checkpoint=str(checkpoint), resume=True)

    place = "round" if name.endswith("within-epoch") else "the end"
    assert f"Resuming at {place} " in "\n".join(caplog.messages)
    first, last = history.history["loss"]
    assert first == pytest.approx(results[name][0], rel=1e-4)
    assert last < first if name == "asynchronous" else last == pytest.approx(results[name][1], rel=1e-4)
