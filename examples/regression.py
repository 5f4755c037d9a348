"""A regression on a DataFrame: one number from two columns, early stopping, a saved model."""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from sparkdl import SparkModel, load_spark_model

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

# Synthetic rides in a town, made by Spark: a price per kilometre, more at night, and some noise.
rides = (
    spark.range(8_000)
    .withColumn("kilometres", sql.rand(1) * 10)
    .withColumn("night", (sql.rand(2) < 0.3).cast("double"))
    .withColumn("price", 3 + sql.col("kilometres") * (2 + sql.col("night")) + 0.3 * sql.randn(3))
)
table = VectorAssembler(inputCols=["kilometres", "night"], outputCol="ride").transform(rides)
train, test = table.randomSplit([0.8, 0.2], seed=0)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((2,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(3e-3), "mse", metrics=["mae"])

spark_model = SparkModel(model)
stop = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
spark_model.fit(
    train, epochs=20, validation_data=test, callbacks=[stop], features_col="ride", label_col="price"
)

with tempfile.TemporaryDirectory() as folder:
    spark_model.save(f"{folder}/rides.keras")
    loaded = load_spark_model(f"{folder}/rides.keras")
loaded.predict(test, features_col="ride").select("kilometres", "night", "price", "prediction").show(3)
scores = loaded.evaluate(test, features_col="ride", label_col="price", return_dict=True)
print("Mean absolute error:", round(scores["mae"], 3))
spark.stop()
