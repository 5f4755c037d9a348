"""Event files of TensorBoard, written as Keras's TensorBoard callback writes them.

That callback writes with TensorFlow's summaries, so TensorFlow is needed on any backend. It is not imported
with this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

INSTALL = {
    "tensorboard": "Install it on the driver: pip install tensorboard",
    "tensorflow": "Install them on the driver: pip install 'sparkdl-keras[tensorflow-cpu]' tensorboard",
}


class EventFile:
    """The event file of a run folder.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._summary = require_summaries(type(self).__name__)
        self._writer = self._summary.create_file_writer(os.fspath(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the values of a step, by tag."""
        with self._writer.as_default(), self._summary.record_if(True):
            for tag, value in scalars.items():
                self._summary.scalar(tag, value, step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def require_summaries(name: str) -> Any:
    """Return TensorFlow's module of summaries.

    Args:
        name: the name of the class that needs the module, for the error.

    Raises:
        ModuleNotFoundError: TensorFlow or TensorBoard is not installed.
    """
    try:
        import tensorboard  # noqa: F401 - it defines the scalars of TensorFlow's summaries
        import tensorflow
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        raise ModuleNotFoundError(
            f"{name} needs TensorFlow and TensorBoard, with any backend; {package} is not installed. "
            f"{INSTALL.get(package, INSTALL['tensorflow'])}.",
            name=package,
        ) from error
    return tensorflow.summary
