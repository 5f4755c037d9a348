"""A Keras model as a stage of a pipeline: cross-validated, saved, loaded and evaluated by Spark."""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession

from sparkdl.ml import KerasEstimator

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

# Three kinds of flowers that differ in four measures: synthetic here, read from a table in real life.
generator = np.random.default_rng(0)
kinds = ["setosa", "versicolor", "virginica"]
means = [(5.0, 3.4, 1.5, 0.2), (5.9, 2.8, 4.3, 1.3), (6.6, 3.0, 5.6, 2.0)]
rows = [
    (*map(float, generator.normal(mean, 0.4)), kind)
    for kind, mean in zip(kinds, means, strict=True)
    for _ in range(200)
]
flowers = spark.createDataFrame(rows, ["a", "b", "c", "d", "kind"])
training, test = flowers.randomSplit([0.8, 0.2], seed=0)

model = keras.Sequential(
    [
        keras.Input((4,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
network = KerasEstimator(model=model, batchSize=32, seed=0)

pipeline = Pipeline(
    stages=[
        StringIndexer(inputCol="kind", outputCol="label"),
        VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="raw"),
        StandardScaler(inputCol="raw", outputCol="features", withMean=True),
        network,
    ]
)
accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
grid = ParamGridBuilder().addGrid(network.epochs, [1, 8]).build()
search = CrossValidator(estimator=pipeline, estimatorParamMaps=grid, evaluator=accuracy, numFolds=2, seed=0)
found = search.fit(training)
print("Accuracy by epochs:", dict(zip([1, 8], np.round(found.avgMetrics, 3).tolist(), strict=True)))

with tempfile.TemporaryDirectory() as folder:
    found.bestModel.save(f"{folder}/flowers")
    loaded = PipelineModel.load(f"{folder}/flowers")
predicted = loaded.transform(test)
predicted.select("kind", "label", "prediction", "probability").show(3, truncate=False)
print("Accuracy on test rows:", round(accuracy.evaluate(predicted), 3))
spark.stop()
