"""Checks of a SparkModel's settings and model when it is made, before any fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.config import Placement, TrainConfig
from sparkdl.core.reduction import is_elementwise
from sparkdl.errors import ConfigError
from sparkdl.modeling import checks, keras_settings, optimizers
from sparkdl.modeling.backends.choice import require_distribution, require_supported
from sparkdl.modeling.keras_types import Model
from sparkdl.rules import Average, Rule, choose


def rule_of(config: TrainConfig) -> Rule:
    """Return the merge rule of a SparkModel.

    Raises:
        ConfigError: the rule does not exist, or cannot be combined with the other settings.
    """
    config = config.last
    merge = config.merge
    rule = choose(merge, mode=config.mode.value, window=config.window).rule
    if rule.elastic and config.hybrid:
        raise ConfigError(
            f'merge="{rule.name}" moves the worker and the center towards each other, and a late update '
            "would move only one of them. Leave quorum and straggler_timeout out."
        )
    if config.placement is Placement.EXECUTORS and not is_elementwise(rule.reduction()):
        raise ConfigError(
            f'merge="{rule.name}" needs all deltas in one place, but with placement="executors" each worker '
            'reduces a part of them; got both. Set placement="driver", or use another rule. A reduction of '
            "your own that works element by element says so with elementwise = True."
        )
    if config.joint and merge is not None and rule.name != Average.name:
        raise ConfigError(
            'merge needs workers that train separately between exchanges, but mode="synchronous" with '
            f'frequency="batch" averages gradients; got merge={merge!r}. Leave merge out, or set frequency '
            'to "epoch" or a number of batches.'
        )
    return rule


def require_trainable(model: Model, rule: Rule, distribution: Callable[[], Any] | None) -> None:
    """Require a model that workers can train with this rule and distribution.

    Raises:
        ConfigError: the Keras backend is not supported, the distribution does not suit the backend, or the
            rule does not suit the model's optimizer.
        ModelError: the model is not a compiled Keras model, or uses features that workers do not support.
    """
    checks.require_compiled(model)
    checks.require_honoured(model)
    if rule.momentum:
        optimizers.require_nesterov(model, rule.name)
    require_supported(keras_settings.backend())
    require_distribution(keras_settings.backend(), distribution)


def require_http(mode: str) -> None:
    """Check ``parameter_server_mode``, the protocol argument of Elephas.

    Raises:
        ConfigError: the mode is not "http".
    """
    if mode != "http":
        raise ConfigError(
            f'parameter_server_mode should be "http", the only supported value; got {mode!r}. Leave it out.'
        )
