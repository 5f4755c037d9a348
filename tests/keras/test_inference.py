"""Predictions for a batch of Arrow columns, without Spark."""

import tracemalloc

import keras
import numpy as np
import pyarrow as pa
from vectors import VECTORS

from sparkdl.modeling import serialization, signature
from sparkdl.modeling.classification import AS_IT_IS
from sparkdl.worker.inference import InferenceJob, load_model, predict_columns
from sparkdl.worker.user_code import Code


def predicted(model, column, batch_size):
    """Return a task's predictions for a column."""
    spec, objects = serialization.freeze(model, None, None, trains=False)
    job = InferenceJob(spec, batch_size, signature.known_features(model))
    loaded = load_model(job, Code(objects), 1)
    return predict_columns(loaded, job, [column], output=(1,), head=AS_IT_IS, decode={}).to_numpy()


def test_wide_sparse_vectors_are_never_all_dense_at_once():
    """Wide sparse vectors become dense a few rows at a time; a whole batch would take a gigabyte."""
    size, count, random = 1 << 18, 1000, np.random.default_rng(0)
    indices = random.integers(0, size, (count, 3))
    rows = [{"type": 0, "size": size, "indices": sorted(each), "values": [1.0] * 3} for each in indices]
    model = keras.Sequential([keras.Input((size,)), keras.layers.Dense(1, use_bias=False)])
    weights = model.get_weights()[0][:, 0]

    tracemalloc.start()
    found = predicted(model, pa.array(rows, VECTORS), batch_size=1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    np.testing.assert_allclose(weights[indices].sum(1), found, atol=1e-6)
    assert peak < 300e6 < count * size * 4


def test_rows_of_a_batch_are_cut_into_whole_batches():
    """Narrow rows stay together; each prediction belongs to its row, whatever the batch size."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    x = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4).cast(pa.list_(pa.float32()))
    expected = model.predict(x, verbose=0)[:, 0]

    for batch_size in (1, 7, 50, 1000):
        np.testing.assert_allclose(expected, predicted(model, column, batch_size), atol=1e-6)
