"""Each worker gets its own GPU where executors have several, also where other tasks share them."""

import json
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import json, sys
    import keras, numpy as np
    from pyspark.sql import SparkSession
    import sparkdl
    from sparkdl import SparkModel

    settings = json.loads(sys.argv[1])
    builder = SparkSession.builder.master("local-cluster[1,4,1024]").config(map=settings)
    spark = builder.getOrCreate()
    x, y = np.ones((64, 2), "float32"), np.zeros((64, 1), "float32")

    def fit(data, **options):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return SparkModel(model, **options).fit(*data, verbose=0).training["gpus"]

    def refused():
        try:
            fit((x, y), num_workers=3)
        except sparkdl.errors.ClusterError as error:
            return str(error)

    rows = [(vector, value) for vector, value in zip(x.tolist(), y[:, 0].tolist())]
    answers = {
        "arrays": fit((x, y)),
        "DataFrame": fit((spark.createDataFrame(rows, ["features", "label"]),), mode="asynchronous"),
        "refused": refused(),
        "shared": len(fit((x, y), share_gpus=True)),
        "function": sparkdl.run(lambda worker: (worker.device, __import__("os").environ["OMP_NUM_THREADS"])),
    }
    print("ANSWERS", json.dumps(answers))
    spark.stop()
"""


@pytest.mark.whole
@pytest.mark.cluster
def test_workers_have_a_gpu_each_where_other_tasks_have_a_quarter(tmp_path):
    """On four cores and two GPUs two workers run, with two threads each, or four that share GPUs."""
    script = tmp_path / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
    script.chmod(0o755)
    settings = {
        f"spark.{of}.resource.gpu.{name}": value
        for of in ("executor", "worker")
        for name, value in (("amount", "2"), ("discoveryScript", str(script)))
    }
    settings |= {"spark.task.resource.gpu.amount": "0.25", "spark.ui.enabled": "false"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(settings)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert 0 == done.returncode, done.stderr[-3000:]
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))[8:])
    assert [["0"], ["1"]] == sorted(answers["arrays"]) == sorted(answers["DataFrame"])
    assert "the application has 2 (executors x GPUs" in answers["refused"]
    assert 4 == answers["shared"]
    assert [["gpu:0", "2"]] * 2 == answers["function"]  # the first GPU that each sees
