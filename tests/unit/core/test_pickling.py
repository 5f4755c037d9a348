"""User code is pickled by value, with the modules that only the driver has."""

import functools
import importlib
import json
import subprocess
import sys
import textwrap
import threading

import cloudpickle
import pytest

from sparkdl.core import pickling

MODULES = {
    "own_base/__init__.py": "FACTOR = 10\n",
    "own_base/parts.py": """
        from . import FACTOR

        def times(x):
            return FACTOR * x

        def times_late(x):
            from .late import twice
            return twice(times(x))
    """,
    "own_base/late.py": "def twice(x):\n    return 2 * x\n",
    "own_tools.py": """
        import own_base.parts
        from own_base import parts

        SETTINGS = {"offset": 0}

        class Scale:
            def __init__(self, factor):
                self.factor = factor

            def __call__(self, x):
                return self.factor * x + SETTINGS["offset"]

        def ten_times(x):
            return parts.times(x)

        def late(x):
            import own_late
            return own_late.half(x)
    """,
    "own_late.py": "def half(x):\n    return x / 2\n",
}
MAIN = """
    import functools
    import own_base.parts
    import own_tools
    from own_tools import Scale, ten_times

    def module(x):
        return own_tools.ten_times(x)

    def submodule(x):
        return own_base.parts.times(x)

    def function(x):
        return ten_times(x)

    def instance(x):
        return Scale(3)(x)

    def inside(x):
        import own_tools
        return own_tools.ten_times(x)

    def part_inside(x):
        from own_base.parts import times
        return times(x)

    def submodule_inside(x):
        import own_base.parts
        return own_base.parts.times(x)

    def package_inside(x):
        from own_base import late, parts
        return late.twice(parts.times(x))

    def late_of_a_module(x):
        return own_tools.late(x)

    def relative_of_a_module(x):
        return own_base.parts.times_late(x)

    def nested(x):
        def inner(x):
            import own_late
            return own_late.half(x)
        return inner(x)

    def default(x, use=ten_times):
        return use(x)

    def calls(x):
        return module(x) + instance(x)

    def closure_of(use):
        return lambda x: use(x)

    class Derived(Scale):
        def __call__(self, x):
            return super().__call__(x) + 1

    closure = closure_of(ten_times)
    method = Scale(4).__call__
    held = Scale(4)
    derived = Derived(4)
    partial = functools.partial(ten_times)
    of_a_module = ten_times
"""
EXPECTED = {
    "module": 20,
    "submodule": 20,
    "function": 20,
    "instance": 6,
    "inside": 20,
    "part_inside": 20,
    "submodule_inside": 20,
    "package_inside": 40,
    "late_of_a_module": 1,
    "relative_of_a_module": 40,
    "nested": 1,
    "default": 20,
    "calls": 26,
    "closure": 20,
    "method": 8,
    "held": 8,
    "derived": 9,
    "partial": 20,
    "of_a_module": 20,
}
ELSEWHERE = """
import json, pickle, sys
results = {}
for name, data in json.load(sys.stdin).items():
    try:
        results[name] = pickle.loads(bytes.fromhex(data))(2)
    except Exception as error:
        results[name] = repr(error)
print(json.dumps(results))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return the names of a script that uses modules next to it."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(textwrap.dedent(MAIN), names)
    yield names
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def elsewhere(functions):
    """Return the results of functions for 2 in a process that has the package, but not the modules."""
    data = {name: pickling.pickled(function, cloudpickle).hex() for name, function in functions.items()}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=json.dumps(data), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_modules_beside_the_script_travel_with_what_uses_them(program):
    """Modules next to the script are pickled with the functions that use them, directly or indirectly."""
    assert EXPECTED == elsewhere({name: program[name] for name in EXPECTED})
    assert set() == cloudpickle.list_registry_pickle_by_value()


def test_a_module_travels_as_it_is(program):
    """A module is pickled with its current state, including changes by the script."""
    program["own_tools"].SETTINGS["offset"] = 100

    assert {"instance": 106} == elsewhere({"instance": program["instance"]})


def test_a_module_that_cannot_be_pickled_goes_by_its_name(program, caplog):
    """A module that cannot be pickled is sent by name, and a log line says that executors need it."""
    program["own_tools"].lock = threading.Lock()
    data = pickling.pickled(functools.partial(program["module"]), cloudpickle)

    assert b"own_tools" in data
    assert 20 == cloudpickle.loads(data)(2)
    assert "cannot pickle '_thread.lock' object), so executors need copies" in "\n".join(caplog.messages)


def test_what_is_installed_goes_by_its_name():
    """Installed modules are sent by name: executors have them."""
    assert len(pickling.pickled(pytest.approx, cloudpickle)) < 200
