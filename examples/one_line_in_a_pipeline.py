"""An existing pipeline, and the one line that trains a network on its output."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from pyspark.ml import Pipeline
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import SparkSession

from sparkdl import SparkModel

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

# Three kinds of flowers that differ in four measures: synthetic here, read from a table in real life.
generator = np.random.default_rng(0)
kinds = ["setosa", "versicolor", "virginica"]
means = [(5.0, 3.4, 1.5, 0.2), (5.9, 2.8, 4.3, 1.3), (6.6, 3.0, 5.6, 2.0)]
rows = [
    (*map(float, generator.normal(mean, 0.4)), kind)
    for kind, mean in zip(kinds, means, strict=True)
    for _ in range(300)
]
flowers = spark.createDataFrame(rows, ["a", "b", "c", "d", "kind"])

pipeline = Pipeline(
    stages=[
        StringIndexer(inputCol="kind", outputCol="label"),
        VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="features", withMean=True),
    ]
)
table = pipeline.fit(flowers).transform(flowers)

model = keras.Sequential(
    [
        keras.Input((4,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])

spark_model = SparkModel(model)
history = spark_model.fit(table, epochs=10, validation_split=0.2, seed=0)

spark_model.predict(table).select("kind", "label", "prediction").show(3, truncate=False)
print("Accuracy on held-out rows:", round(history.history["val_accuracy"][-1], 3))
spark.stop()
