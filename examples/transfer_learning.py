"""Transfer learning: a convolutional base trained on some garments classifies others with a new head.

The base is the lower half of a keras.applications model: the upper half is specific to the classes that it
was trained on. Its weights are made here, on five of the ten classes; with Internet access,
weights="imagenet" downloads others.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from images import load_images
from pyspark.sql import SparkSession

from sparkdl import SparkModel

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

images, labels = load_images()
images = np.repeat(np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0))), 3, axis=-1)  # 32 x 32, three channels
known, new = labels < 5, labels >= 5

keras.utils.set_random_seed(0)
whole = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, include_top=False, weights=None)
features = keras.layers.GlobalAveragePooling2D()(whole.get_layer("block_6_expand_relu").output)
base = keras.Model(whole.input, features)
for layer in base.layers:
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.momentum = 0.9  # moving statistics settle within such short epochs


def classifier(rate):
    """Return the base with a new head for five classes, to be trained at a learning rate."""
    made = keras.Sequential([keras.Input((32, 32, 3)), base, keras.layers.Dense(5, activation="softmax")])
    made.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


# Every weight of the base is trained, including its batch normalization.
SparkModel(classifier(3e-3)).fit(images[known], labels[known], epochs=2, batch_size=64, verbose=2, seed=0)

# Only the head is trained: weights of frozen layers do not change and are not exchanged.
base.trainable = False
before = base.get_weights()
model = classifier(1e-2)
few, rest = np.flatnonzero(new)[:1000], np.flatnonzero(new)[1000:]
SparkModel(model).fit(images[few], labels[few] - 5, epochs=12, batch_size=32, verbose=2, seed=0)

scores = SparkModel(model).evaluate(images[rest], labels[rest] - 5, return_dict=True)
same = all(np.array_equal(a, b) for a, b in zip(before, base.get_weights(), strict=True))
print("The base is as it was:", same)
print("Accuracy on new garments:", round(scores["accuracy"], 3))
spark.stop()
