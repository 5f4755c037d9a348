"""Names of Keras's types for annotations. A module that uses them need not import Keras itself."""

from __future__ import annotations

from typing import TypeAlias

import keras

Callback: TypeAlias = keras.callbacks.Callback
History: TypeAlias = keras.callbacks.History
Model: TypeAlias = keras.Model
