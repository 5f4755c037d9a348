"""Problems of the convergence study: six tasks with their rows and models.

MNIST with an MLP, Fashion-MNIST with a convolutional network with BatchNormalization and with a small ResNet,
a tabular regression (Friedman's first function), and two small transformers on the documentation that comes
with Python: of one block on characters, and of two blocks with dropout on word pieces.
"""

import hashlib
import itertools
import pydoc_data.topics
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from contestants import read_idx

CONTEXT = 16  # characters, or word pieces, that a transformer sees
PIECES = 384  # the vocabulary of word pieces
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\n()"  # plus one for all others
TEXT = "e393647bdb24a26bce8f81bec238e5ad707e5ecbeab6ba6ebff991d13b4e5399"  # SHA-256 of Python 3.11.7's


@dataclass(frozen=True)
class Problem:
    """A problem: a model and its data.

    Attributes:
        load: returns (x, y), (x_test, y_test), given the folder that has ``mnist`` and ``fashion-mnist``.
        make: returns the model without an optimizer.
        loss: its loss.
        score: Keras's name of the score that is reported with the loss; at most 1, where a point is 0.01.
        batch_size: rows per update.
        rates: the learning rate of each optimizer, by its name.
        falls: the optimizers whose rate falls to 0 by a cosine over the run.
    """

    load: Callable
    make: Callable
    loss: str
    score: str
    batch_size: int
    rates: dict[str, float]
    falls: tuple[str, ...] = ()


def images(name, rows):
    """Return a function that loads the first rows of an image data set."""

    def load(folder):
        parts = [read_idx(Path(folder, name), part) for part in ("train", "t10k")]
        (x, y), test = [(x[..., None].astype("float32") / 255, y.astype("int32")) for x, y in parts]
        return (x[:rows], y[:rows]), test

    return load


def friedman(folder):
    """Return 20,000 and 5,000 rows of Friedman's function of 10 variables, with noise, standardized."""
    rng = np.random.default_rng(0)
    x = rng.random((25_000, 10)).astype("float32")
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = (y + rng.normal(size=len(y))).astype("float32")
    x, y = (x - 0.5) / np.sqrt(1 / 12), (y - y.mean()) / y.std()
    return (x[:20_000], y[:20_000, None]), (x[20_000:], y[20_000:, None])


def documentation():
    """Return the text of Python's documentation, which differs from one patch release to the next."""
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).lower()
    if hashlib.sha256(text.encode()).hexdigest() != TEXT:
        raise SystemExit(
            "The problems 'characters' and 'pieces' need the documentation of Python 3.11.7, since scores on "
            "other texts are not comparable. Use Python 3.11.7, or leave out these problems."
        )
    return text


def characters(folder):
    """Return 16,000 and 4,000 stretches of Python's documentation, and the same one character on.

    Test stretches come from the last fifth of the text, training stretches from before it.
    """
    text = documentation()
    codes = np.array([ALPHABET.find(character) for character in text], "int32") + 1
    parts, rng = np.split(codes, [len(codes) * 4 // 5]), np.random.default_rng(0)
    return tuple(stretches(part, count, rng) for part, count in zip(parts, (16_000, 4_000), strict=True))


def word_pieces(folder):
    """Return 16,000 and 4,000 stretches of word pieces of Python's documentation, and the same one piece on.

    Test stretches come from the last fifth of the text, training stretches from before it.
    """
    words = re.findall(r" ?[a-z]+|[^a-z]", documentation())
    pieces = pieces_of(Counter(words[: len(words) * 4 // 5]))
    known = {
        piece: code for code, piece in enumerate(sorted({p for word in pieces.values() for p in word}), 1)
    }
    split = [pieces.get(word, tuple(word)) for word in words]
    codes = np.array([known.get(piece, 0) for word in split for piece in word], "int32")
    parts, rng = np.split(codes, [len(codes) * 4 // 5]), np.random.default_rng(0)
    return tuple(stretches(part, count, rng) for part, count in zip(parts, (16_000, 4_000), strict=True))


def pieces_of(counts):
    """Return the pieces of each word: byte-pair encoding (Sennrich et al., 2016) with at most PIECES pieces.

    Args:
        counts: the number of times that each word occurs.
    """
    pieces = {word: tuple(word) for word in counts}
    size = len({letter for word in counts for letter in word})
    for _ in range(PIECES - 1 - size):
        pairs = Counter()
        for word, count in counts.items():
            for pair in itertools.pairwise(pieces[word]):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        for word, parts in pieces.items():
            if best in itertools.pairwise(parts):
                pieces[word] = joined(parts, best)
    return pieces


def joined(parts, pair):
    """Return the parts of a word with each occurrence of a pair of them joined."""
    found = []
    for part in parts:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return tuple(found)


def stretches(codes, count, rng):
    """Return stretches of a text, and the same one character on."""
    starts = rng.permutation(len(codes) - CONTEXT)[:count]
    rows = codes[starts[:, None] + np.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def mlp():
    """Return two dense layers with dropout, and a softmax."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )


def cnn():
    """Return two convolutions with BatchNormalization, and a softmax."""
    layers, found = keras.layers, [keras.Input((28, 28, 1))]
    for filters in (16, 32):
        found += [layers.Conv2D(filters, 3, strides=2, use_bias=False), layers.BatchNormalization()]
        found.append(layers.Activation("relu"))
    return keras.Sequential([*found, layers.Flatten(), layers.Dense(10, activation="softmax")])


def resnet():
    """Return a ResNet of three residual blocks with BatchNormalization (He et al., 2016), and a softmax."""
    layers, image = keras.layers, keras.Input((28, 28, 1))

    def normalized(found, filters, size, strides):
        found = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)(found)
        return layers.BatchNormalization()(found)

    found = layers.Activation("relu")(normalized(image, 8, 3, 2))
    for filters, strides in ((8, 1), (16, 2), (32, 2)):
        inner = layers.Activation("relu")(normalized(found, filters, 3, strides))
        inner = normalized(inner, filters, 3, 1)
        if strides > 1:
            found = normalized(found, filters, 1, strides)
        found = layers.Activation("relu")(found + inner)
    return keras.Model(image, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(found)))


def tabular():
    """Return two dense layers and one number."""
    layers = keras.layers
    found = [keras.Input((10,)), layers.Dense(64, activation="relu"), layers.Dense(64, activation="relu")]
    return keras.Sequential([*found, layers.Dense(1)])


def transformer():
    """Return a block of causal attention over 32 numbers per character, with fixed positions and no dropout.

    Characters are one-hot and dense. With an Embedding, Keras's Adam on TensorFlow takes different steps than
    with the same matrix and a dense gradient, and they differ between one process and several.
    """
    places = keras.layers.Embedding(CONTEXT, 32)(keras.ops.arange(CONTEXT)[None])  # a constant
    return blocks(len(ALPHABET) + 1, lambda codes: places, 1, 0.0)


def deep_transformer():
    """Return two blocks of causal attention over 32 numbers per word piece, with dropout.

    Positions are learned. Like the pieces, they are one-hot and dense.
    """

    def places(codes):
        numbers = keras.ops.cumsum(keras.ops.ones_like(codes), axis=1) - 1
        return keras.layers.Dense(32, use_bias=False)(keras.ops.one_hot(numbers, CONTEXT))

    return blocks(PIECES, places, 2, 0.1)


def blocks(vocabulary, places, count, dropout):
    """Return a model of blocks of causal attention, with normalization before each part.

    Args:
        vocabulary: the number of codes.
        places: a function that returns the vectors of the positions of a batch of codes.
        count: the number of blocks.
        dropout: the rate of dropout after each part of a block.
    """
    layers = keras.layers
    codes = keras.Input((CONTEXT,), dtype="int32")
    found = layers.Dense(32, use_bias=False)(keras.ops.one_hot(codes, vocabulary)) + places(codes)
    for _ in range(count):
        seen = layers.LayerNormalization()(found)
        heads = layers.MultiHeadAttention(4, 8)(seen, seen, use_causal_mask=True)
        found = found + (layers.Dropout(dropout)(heads) if dropout else heads)
        wide = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(found))
        narrow = layers.Dense(32)(wide)
        found = found + (layers.Dropout(dropout)(narrow) if dropout else narrow)
    logits = layers.Dense(vocabulary, activation="softmax")(layers.LayerNormalization()(found))
    return keras.Model(codes, logits)


CLASSES = "sparse_categorical_crossentropy"
PROBLEMS = {
    "mnist": Problem(images("mnist", 60_000), mlp, CLASSES, "accuracy", 64, {"sgd": 0.1, "adam": 1e-3}),
    "fashion": Problem(
        images("fashion-mnist", 12_000),
        cnn,
        CLASSES,
        "accuracy",
        64,
        {"sgd": 0.03, "adam": 1e-3, "adamw": 1e-3},
        falls=("adamw",),
    ),
    "resnet": Problem(
        images("fashion-mnist", 12_000),
        resnet,
        CLASSES,
        "accuracy",
        64,
        {"sgd": 0.3, "adam": 3e-3},
        falls=("sgd", "adam"),
    ),
    "tabular": Problem(friedman, tabular, "mse", "r2_score", 64, {"sgd": 0.05, "adam": 1e-3}),
    "characters": Problem(
        characters,
        transformer,
        CLASSES,
        "accuracy",
        32,
        {"adam": 3e-3, "adamw": 3e-3},
        falls=("adam", "adamw"),
    ),
    "pieces": Problem(
        word_pieces, deep_transformer, CLASSES, "accuracy", 32, {"adam": 3e-3}, falls=("adam",)
    ),
}
OPTIMIZERS = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW}


def make_model(problem: Problem, optimizer: str, seed: int, steps: int, scale: float = 1.0):
    """Return the compiled model with the seed's initial weights.

    Args:
        problem: the problem.
        optimizer: a name of its ``rates``.
        seed: the seed of the initial weights.
        steps: batches in the whole run.
        scale: the factor of the learning rate.
    """
    keras.utils.set_random_seed(seed)
    model, rate = problem.make(), scale * problem.rates[optimizer]
    if optimizer in problem.falls:
        rate = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(OPTIMIZERS[optimizer](rate), problem.loss, metrics=[problem.score])
    return model
