"""The user's objects and functions that tasks need.

The driver sends them inside Spark's closure, and every kind of task passes them on to the code that makes the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.rules import Rule

if TYPE_CHECKING:  # these import Keras, which needs the task's devices set up first
    from sparkdl.modeling.configuration import Objects
    from sparkdl.modeling.keras_types import Model


@dataclass(frozen=True)
class Code:
    """The user's code that a task needs, which is sent inside Spark's closure.

    Attributes:
        objects: the custom objects of the model.
        builder: the function that builds the model, if there is one.
        distribution: the function that makes the distribution over a worker's devices, if there is one.
        rule: the rule, whose class may be the user's own; None for the rule of the settings.
    """

    objects: Objects = field(default_factory=dict)
    builder: Callable[[], Model] | None = None
    distribution: Callable[[], object] | None = None
    rule: Rule | None = None
