"""Pickling of the user's code, to send it to executors and to compare models.

Code of an installed package is pickled by name, as usual. All other code is pickled by value: executors do
not have it, and a module that was edited and reloaded must count as different code. This covers everything
that pickling reaches: a function's globals and closure, the modules it refers to, their references in turn,
and modules that are imported inside functions.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import io
import logging
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)
EVERYWHERE = {"py4j", "pyspark", "sparkdl"}  # executors have them, however they are installed
_pickling = threading.RLock()  # held while modules are registered for pickling by value
# Reducers for objects that do not pickle well themselves. Each takes an object and a pickler, and returns
# what ``__reduce__`` would return, or NotImplemented for an object that it does not handle.
reducers: list[Callable[[object, ModuleType], object]] = []


def pickled(code: object, pickler: ModuleType) -> bytes:
    """Return code as bytes; code that belongs to no installed package is pickled by value.

    If that fails, the user's modules are pickled by name, with a warning.

    Args:
        code: the object to pickle.
        pickler: cloudpickle, or PySpark's copy of it.
    """
    with _pickling:
        before = pickler.list_registry_pickle_by_value()
        try:
            return _whole(code, pickler)
        except Exception as error:  # noqa: BLE001 - pickling an object may raise anything
            own = _unregister(before, pickler)
            try:
                found = _dumped(code, pickler, {}, own=False)[0]
            except Exception:  # noqa: BLE001 - the first error shows the cause
                raise error from None
            logger.warning(
                "The modules %s cannot all be pickled (%s), so executors need copies of their own. Install "
                "them there, or send them with --py-files or SparkContext.addPyFile.",
                ", ".join(own),
                error,
            )
            return found
        finally:
            _unregister(before, pickler)


def _unregister(before: set[str], pickler: ModuleType) -> list[str]:
    """Undo the registration of the user's modules for pickling by value; return their names."""
    own = sorted(pickler.list_registry_pickle_by_value() - before)
    for name in own:
        pickler.unregister_pickle_by_value(sys.modules[name])
    return own


def _whole(code: object, pickler: ModuleType) -> bytes:
    """Return code as bytes, together with the modules that it imports when it runs."""
    modules: dict[str, ModuleType] = {}
    while True:
        data, names = _dumped(code, pickler, modules, own=True)
        found = {name: module for name in sorted(names) if (module := _own_module(name)) is not None}
        if found.keys() <= modules.keys():
            return data
        modules |= found


def _dumped(
    code: object, pickler: Any, modules: dict[str, ModuleType], *, own: bool
) -> tuple[bytes, set[str]]:
    """Return code as bytes, and the names of the modules that its functions import when they run."""
    imported: set[str] = set()

    class Pickler(pickler.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, thing: object) -> object:
            for reducer in reducers:
                found = reducer(thing, pickler)
                if found is not NotImplemented:
                    return found
            if own and isinstance(thing, FunctionType | ModuleType | type):
                _register(thing, pickler)
                if isinstance(thing, FunctionType) and not _is_installed(thing.__module__):
                    imported.update(_imports(thing.__code__, thing.__globals__.get("__package__")))
            return super().reducer_override(thing)

    with io.BytesIO() as file:
        Pickler(file).dump(_Importing(modules, code) if modules else code)
        return file.getvalue(), imported


class _Importing:
    """A wrapper that unpickles to its code, and registers the modules that the code imports."""

    def __init__(self, modules: dict[str, ModuleType], code: object) -> None:
        self.modules, self.code = modules, code

    def __reduce__(self) -> tuple[object, ...]:
        return _with_modules, (self.modules, self.code)


def _with_modules(modules: dict[str, ModuleType], code: object) -> object:
    for name, module in modules.items():
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package in modules:
            setattr(modules[package], last, module)
    return code


def _register(thing: object, pickler: ModuleType) -> None:
    """Register the user's own module, or that of a function or class, for pickling by value."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    if not isinstance(name, str) or name == "__main__" or _is_installed(name):
        return
    top = sys.modules[name.split(".")[0]]
    if top.__name__ not in pickler.list_registry_pickle_by_value():
        pickler.register_pickle_by_value(top)


def _own_module(name: str) -> ModuleType | None:
    """Return the user's own module of this name, imported if necessary.

    The result is None if there is no such module, or if its import fails.
    """
    top = name.split(".")[0]
    try:
        if top not in sys.modules:
            spec = importlib.util.find_spec(top)
            if spec is None or _has_place(
                spec.origin or next(iter(spec.submodule_search_locations or ()), None)
            ):
                return None
        elif _is_installed(top):
            return None
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - an import may raise anything, here and on executors
        return None


def _imports(code: CodeType, package: str | None) -> Iterator[str]:
    """Yield the names of the modules that a function imports when it runs, and of their parent packages."""
    constants: list[Any] = [None, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, parts = constants[-2:]
            name = str(instruction.argval)
            if level and not package:
                continue
            if level:
                name = importlib.util.resolve_name("." * level + name, package or "")
            names = [name, *(f"{name}.{part}" for part in parts or ())]
            for each in names:
                steps = each.split(".")
                yield from (".".join(steps[: count + 1]) for count in range(len(steps)))
        constants.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant, package)


def _is_installed(name: str | None) -> bool:
    """Return True if executors have a module: it belongs to Python or to an installed package."""
    top = (name or "").split(".")[0]
    module = sys.modules.get(top)
    if module is None or top in EVERYWHERE:
        return True
    if top == "__main__":
        return False
    return _has_place(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None))


@functools.lru_cache(maxsize=4096)
def _has_place(place: str | None) -> bool:
    """Return True if executors also have a file: it belongs to Python or to an installed package."""
    if place is None or place in ("built-in", "frozen"):
        return True
    path = Path(place)
    packages = {"site-packages", "dist-packages"}.intersection(path.parts)
    return bool(packages) or path.is_relative_to(sysconfig.get_path("stdlib"))
