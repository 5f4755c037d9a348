"""Elephas's MNIST example, with only its imports changed (and the shipped images instead of MNIST)."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from images import load_images
from keras import Input
from keras.layers import Dense, Dropout
from keras.models import Sequential
from keras.optimizers import SGD
from keras.utils import to_categorical
from pyspark import SparkConf, SparkContext

from sparkdl import SparkModel, to_simple_rdd

conf = SparkConf().setAppName("Mnist_Spark_MLP").setMaster("local[2]").set("spark.ui.enabled", "false")
sc = SparkContext(conf=conf)

x, y = load_images()
x, y = x.reshape(len(x), 784), to_categorical(y, 10)
x_train, y_train, x_test, y_test = x[:8000], y[:8000], x[8000:], y[8000:]

model = Sequential()
model.add(Input((784,)))
model.add(Dense(128, activation="relu"))
model.add(Dropout(0.2))
model.add(Dense(128, activation="relu"))
model.add(Dropout(0.2))
model.add(Dense(10, activation="softmax"))
model.compile(optimizer=SGD(learning_rate=0.1), loss="categorical_crossentropy", metrics=["acc"])

rdd = to_simple_rdd(sc, x_train, y_train)
spark_model = SparkModel(model, frequency="epoch", mode="asynchronous", num_workers=2)
spark_model.fit(rdd, epochs=5, batch_size=64, verbose=0, validation_split=0.1)

score = spark_model.evaluate(x_test, y_test)
print("Test accuracy:", score[1])
print("Epochs recorded:", len(spark_model.training_histories[0]["loss"]))
sc.stop()
