"""`make lint` refuses private parts of other packages outside of the files for them."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools/check_style.py"


@pytest.fixture(scope="module")
def check_style():
    spec = importlib.util.spec_from_file_location("check_style", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def found(check_style, tmp_path):
    """A function that returns the problems of a module beside the file for private parts of Keras."""

    def problems(text):
        internals, module = tmp_path / "modeling/keras_internals.py", tmp_path / "modeling/module.py"
        internals.parent.mkdir(exist_ok=True)
        internals.write_text("def rate(optimizer):\n    return optimizer._learning_rate\n")
        module.write_text(text)
        return list(check_style.foreign([internals, module]))

    return problems


FOREIGN = [
    "layers = model._flatten_layers()",
    "rate = getattr(optimizer, '_learning_rate', None)",
    "setattr(model, '_initial_epoch', 0)",
    "from keras.src.losses import loss",
    "class Own:\n    def __init__(self):\n        self._learning_rate = 1\nprint(other._learning_rate)",
]


@pytest.mark.parametrize("text", FOREIGN)
def test_private_parts_of_other_packages_are_refused(text, found):
    """A private attribute of another package is refused, by whatever name it is reached."""
    (problem,) = found(text)

    assert "module.py" in problem
    assert "internals.py only" in problem


OWN = [
    "class Own:\n    def __init__(self):\n        self._kept = 0\nOwn()._kept = 1",
    "class Own:\n    def _method(self):\n        return super()._method()\nOwn()._method()",
    "pair._replace(first=1)._asdict()",
    "print(module.__name__, getattr(module, name))",
]


@pytest.mark.parametrize("text", OWN)
def test_private_parts_of_this_package_are_not_refused(text, found):
    """Private attributes of the package's own classes and methods of named tuples are not refused."""
    assert found(text) == []


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("What a window does to a replica.", True),
        ("Return whether a worker is lost.", True),
        ("Where it runs.", True),
        ("Strategies for one window of local training.", False),
        ("Return True if a worker is lost.", False),
        ("Exclude an idle worker from the staleness bound, wherever it is.", False),
    ],
)
def test_first_lines_name_a_thing_or_give_an_order(check_style, tmp_path, line, refused):
    """A docstring whose first line begins with a word such as "what" or "whether" is refused."""
    module = tmp_path / "module.py"
    module.write_text(f'"""{line}"""\n')

    assert refused == bool(list(check_style.first_lines(module)))
