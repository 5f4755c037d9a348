"""The notebooks of the repository have clean outputs, and all of them are in the site."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [notebook.stem for notebook in NOTEBOOKS]
PRINTED = {"output_type": "stream", "name": "stdout", "text": ["loss: 0.5, 3 rows/s, 1/2\n"]}
TABLE = {"output_type": "display_data", "data": {"text/html": "<p><b>rows/s</b></p>", "image/png": "/a/b/c"}}
UNCLEAN = [
    ({"output_type": "error", "ename": "KeyError", "evalue": "", "traceback": []}, "the error KeyError"),
    ({**PRINTED, "name": "stderr"}, "output on stderr"),
    ({**PRINTED, "text": "saved in /home/user/model\n"}, "an absolute path: /home/user"),
    ({**PRINTED, "text": "saved in /Users/ada/model\n"}, "an absolute path: /Users/ada"),
    ({**TABLE, "data": {"text/html": ["<p>", "'/tmp/x/y'</p>"]}}, "an absolute path: /tmp/x"),
    ({**PRINTED, "text": "Live page: http://192.0.2.7:41893/?k=r2xk"}, "an address: 192.0.2.7"),
    ({**PRINTED, "text": "UserWarning: no seed"}, "a warning: UserWarning"),
    (
        {**PRINTED, "text": "Traceback (most recent call last):"},
        "a traceback: Traceback (most recent call last)",
    ),
    ({**TABLE, "data": {"application/vnd.jupyter.widget-view+json": {}}}, "a widget"),
]


@pytest.fixture(scope="module")
def check_notebooks():
    spec = importlib.util.spec_from_file_location("check_notebooks", ROOT / "tools/check_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def found(check_notebooks, tmp_path):
    """A function that returns the problems of a notebook with one cell, which has one output."""

    def problems(output, count=1):
        cell = {"cell_type": "code", "id": "a", "execution_count": count, "outputs": [output], "source": []}
        path = tmp_path / "a.ipynb"
        path.write_text(json.dumps({"cells": [cell], "metadata": {}}))
        return [problem.removeprefix(f"{path}: ") for problem in check_notebooks.problems(path)]

    return problems


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_the_outputs_of_a_notebook_are_clean(check_notebooks, notebook):
    """A notebook was executed, and has no error, no warning, no path and no large output."""
    assert [] == [problem.removeprefix(f"{ROOT}/") for problem in check_notebooks.problems(notebook)]


def test_each_notebook_is_in_the_site():
    """The page of the notebooks has each of them in its table and in its toctree, and no other."""
    page = (ROOT / "docs/tutorials/notebooks.md").read_text()

    assert NAMES == sorted(re.findall(r"^notebooks/(\w+)$", page, re.MULTILINE))
    assert NAMES == sorted(re.findall(r"\]\(\.\./\.\./notebooks/(\w+)\.ipynb\)", page))


def test_links_of_notebooks_resolve():
    """Every link from a notebook to a page of the documentation leads to a file."""
    texts = [notebook.read_text() for notebook in NOTEBOOKS]
    links = {link for text in texts for link in re.findall(r"\]\((\.\./[^)#]+)", text)}

    assert links
    assert [] == [link for link in links if not (ROOT / "notebooks" / link).is_file()]


@pytest.mark.parametrize("output", [PRINTED, TABLE], ids=["text", "table"])
def test_an_output_may_have_ratios_and_tags(found, output):
    """The slashes in units, ratios, closing tags and pictures are not paths."""
    assert [] == found(output)


@pytest.mark.parametrize(("output", "problem"), UNCLEAN, ids=[problem for _, problem in UNCLEAN])
def test_an_unclean_output_is_found(found, output, problem):
    """An output with something that the site should not show is named with its cell."""
    assert [f"cell a: {problem}"] == found(output)


def test_a_notebook_that_was_not_executed_is_found(found):
    """A cell without a number was not executed."""
    [problem] = found(PRINTED, count=None)
    assert "not executed from top to bottom" in problem


def test_a_large_notebook_is_found(found, check_notebooks):
    """A notebook has a limited size, outputs included."""
    [problem] = found({**PRINTED, "text": "-" * check_notebooks.SIZE})
    assert problem.endswith(f"a notebook has at most {check_notebooks.SIZE}")
