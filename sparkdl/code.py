"""Code as bytes: classes and functions of the user's own that go to executors, or tell two models apart.

What an installed package holds goes by its name, as pickle does it. What does not, goes whole, for
executors do not have it, and a module that was edited and loaded again is another one.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_pickling = threading.Lock()


def pickled(code: Any, objects: Iterable[Any], pickler: Any) -> bytes:
    """Return code as bytes; what is not of an installed package goes whole, not by its module's name.

    Args:
        code: what is pickled.
        objects: classes and functions in it that may be of the user's own modules.
        pickler: cloudpickle, or the copy of it that PySpark has.
    """
    names = {_module_of(one).split(".")[0] for one in objects}
    own = [sys.modules[name] for name in names if name in sys.modules and not _installed(sys.modules[name])]
    with _pickling:
        new = [module for module in own if module.__name__ not in pickler.list_registry_pickle_by_value()]
        for module in new:
            pickler.register_pickle_by_value(module)
        try:
            return bytes(pickler.dumps(code))
        finally:
            for module in new:
                pickler.unregister_pickle_by_value(module)


def _module_of(code: Any) -> str:
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__module__", type(code).__module__))


def _installed(module: Any) -> bool:
    """Return whether a module is one that executors have: Python's own, or of an installed package."""
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    if place is None or module is sys.modules["sparkdl"]:
        return True
    path = Path(place)
    packages = {"site-packages", "dist-packages"}.intersection(path.parts)
    return bool(packages) or path.is_relative_to(sysconfig.get_path("stdlib"))
