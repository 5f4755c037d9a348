"""Two streams of one table that grows file by file: one trains a network, the other predicts with it."""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pandas as pd
from pyspark.sql import SparkSession

from sparkdl import SparkModel
from sparkdl.ml import KerasTransformer

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
folder = tempfile.TemporaryDirectory()
generator = np.random.default_rng(0)

# Four files, as if they arrived one after another: each row has three numbers and one of two labels.
os.mkdir(f"{folder.name}/visits")
for number in range(4):
    x = generator.normal(size=(500, 3))
    table = pd.DataFrame({"features": x.tolist(), "label": (x[:, 0] > x[:, 1]).astype("int32")})
    table.to_parquet(f"{folder.name}/visits/{number}.parquet")
visits = spark.readStream.schema("features array<double>, label int").option("maxFilesPerTrigger", 1)
visits = visits.parquet(f"{folder.name}/visits")

model = keras.Sequential(
    [keras.Input((3,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
)
model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
spark_model = SparkModel(model)


def train(batch, number):
    """Continue with the weights and the optimizer of the previous batch."""
    history = spark_model.fit(batch, epochs=2, batch_size=32, verbose=0, seed=number).history
    print(f"Batch {number}: loss {history['loss'][0]:.3f} to {history['loss'][-1]:.3f}")


training = visits.writeStream.foreachBatch(train)
training.option("checkpointLocation", f"{folder.name}/trained").trigger(
    availableNow=True
).start().awaitTermination()

predicted = KerasTransformer(model=model).transform(visits)
writing = predicted.writeStream.option("checkpointLocation", f"{folder.name}/predicted")
writing.trigger(availableNow=True).start(f"{folder.name}/kinds").awaitTermination()

kinds = spark.read.parquet(f"{folder.name}/kinds")
print("Rows with their prediction:", kinds.count())
print("Accuracy of the stream:", round(kinds.where("prediction = label").count() / kinds.count(), 3))
spark.stop()
folder.cleanup()
