"""MLflow records a fit: parameters, metrics by epoch, and the trained model."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder instead of a tracking server

import keras
import mlflow
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import SparkModel

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

# Points inside and outside a circle.
generator = np.random.default_rng(0)
x = generator.uniform(-1, 1, size=(2000, 2)).astype("float32")
y = (np.hypot(*x.T) < 0.8).astype("int64")

model = keras.Sequential(
    [
        keras.Input((2,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=["accuracy"])

with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(Path(folder, "runs").as_uri())
    mlflow.keras.autolog()  # or mlflow.autolog()
    with mlflow.start_run() as run:
        SparkModel(model, num_workers=2).fit(x, y, epochs=5, validation_split=0.2, verbose=0)

    client = mlflow.MlflowClient()
    params = client.get_run(run.info.run_id).data.params
    print("Parameters:", {name: params[name] for name in ("epochs", "num_workers", "mode", "optimizer_name")})
    # By step, because MLflow logs the first epoch again together with the model.
    losses = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "val_loss")}
    for epoch, loss in sorted(losses.items()):
        print(f"Epoch {epoch}: val_loss {loss:.3f}")
    loaded = mlflow.keras.load_model(f"runs:/{run.info.run_id}/model")
    print("Accuracy of the logged model:", round(loaded.evaluate(x, y, verbose=0)[1], 3))
spark.stop()
