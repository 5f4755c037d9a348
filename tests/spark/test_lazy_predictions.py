"""Cleanup of the files that lazily computed predictions leave in an application."""

import gc
from pathlib import Path

import pytest

from sparkdl import SparkModel
from sparkdl.ml import KerasTransformer

pytestmark = pytest.mark.classic
TIMES = 10


@pytest.mark.whole
def test_the_files_of_models_go_with_the_plans_that_need_them(spark, problem, frames, eventually):
    """Model files are removed with the plans that use them, though PySpark keeps them to the end."""
    context, transformer = spark.sparkContext, KerasTransformer(model=problem.model())
    folder, rows = Path(context._temp_dir), problem.rdd(spark, 100, 2, 100).keys()
    before = len(list(folder.iterdir()))

    def predict():
        assert len(problem.x) == len(transformer.transform(frames["array"]).collect())
        assert SparkModel(problem.model()).predict(rows).count() > 1

    for _ in range(TIMES):
        predict()

    def few():
        gc.collect()
        context._jvm.System.gc()
        predict()
        return len(list(folder.iterdir())) - before <= TIMES

    assert eventually(few)
