"""Names of Keras's types, for annotations in modules that do not import Keras."""

from __future__ import annotations

from typing import TypeAlias

import keras

Callback: TypeAlias = keras.callbacks.Callback
History: TypeAlias = keras.callbacks.History
Model: TypeAlias = keras.Model
