"""`make lint` refuses unclear docstrings, crowded folders, and private parts of other packages."""

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
        ("Return the rows and whether they are held out.", True),
        ("Suppression of what Spark prints.", True),
        ("Strategies for one window of local training.", False),
        ("Return True if a worker is lost.", False),
        ("Exclude an idle worker from the staleness bound, wherever it is.", False),
    ],
)
def test_first_lines_name_a_thing_or_give_an_order(check_style, tmp_path, line, refused):
    """The first line of a docstring is refused if it begins with such a clause or ends in one."""
    module = tmp_path / "module.py"
    module.write_text(f'"""{line}"""\n')

    assert refused == bool(list(check_style.prose(module)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"""Workers.\n\nThe gang has ended.\n"""', 'write "worker group" or the like instead of "gang"'),
        ('def run():\n    """Return the absent worker."""', 'write "lost" or the like instead of "absent"'),
        ("lost = 1  # the worker was told", 'write "informed" or the like instead of "told"'),
        ("def test_rows():\n    pass", "test_rows has no docstring; write a sentence"),
    ],
)
def test_prose_uses_the_words_of_the_field_and_each_test_has_a_docstring(
    check_style, tmp_path, text, problem
):
    """A word that the field does not use and a test without a docstring are refused."""
    module = tmp_path / "test_module.py"
    module.write_text(text)

    (found,) = check_style.prose(module)

    assert found.endswith(problem)


def test_folders_stay_small(check_style, tmp_path):
    """A folder of more than 20 modules is refused; ``__init__.py`` is not counted."""
    (tmp_path / "inner").mkdir()
    for name in ["__init__", *range(20)]:
        (tmp_path / f"inner/{name}.py").touch()
    assert [] == list(check_style.crowded(tmp_path))

    (tmp_path / "inner/20.py").touch()

    assert [f"{tmp_path}/inner: 21 modules; a folder has at most 20"] == list(check_style.crowded(tmp_path))
