"""The settings that a SparkModel shows as text and as HTML."""

from __future__ import annotations

from typing import Any

from sparkdl.config import TrainConfig
from sparkdl.driver.training_record import counted
from sparkdl.rules import choose


def of_spark_model(model: Any, config: TrainConfig, history: Any) -> dict[str, str]:
    """Return the settings that a person wants to see, by their names.

    Args:
        model: the keras.Model.
        config: the settings.
        history: the History of the last fit; None if there was none.
    """
    last = config.last
    rule = choose(last.merge, mode=last.mode.value, window=last.window).rule
    merges = ["mean of gradients"] * config.joint + [rule.name] * (not last.joint)
    parameters = f"{model.count_params():,} parameters" if model.built else "not built"
    return {
        "model": f"{model.name} ({parameters})",
        "mode": config.mode.value,
        "frequency": str(config.frequency),
        "workers": "one per slot" if config.num_workers is None else str(config.num_workers),
        "merge": ", then ".join(merges),
        "placement": config.placement.value,
        "last fit": "none" if history is None else counted(len(history.epoch), "epoch"),
    }
