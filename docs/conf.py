"""The Sphinx configuration of these pages."""

import os
import re
import shutil
from pathlib import Path

import sparkdl

project = "sparkdl"
author = "The sparkdl developers"
project_copyright = "the sparkdl developers, Apache License 2.0"
version = release = sparkdl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 80
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

# The pages of notebooks show the outputs that are in the repository.
nb_execution_mode = "off"
NOTEBOOKS = "tutorials/notebooks"  # a copy, which git ignores

# A build needs no network. Links to the pages of other libraries are made only on request.
nitpick_ignore_regex = [
    ("py:.*", r"(?!sparkdl\b).*"),
    (
        "py:.*",
        r"sparkdl\.(core|driver|modeling|transport|rules\.outer|tune\.cross_validation)\..*",
    ),  # types that are not public
]
if os.environ.get("SPARKDL_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "numpy": ("https://numpy.org/doc/stable", None),
        "pyspark": ("https://spark.apache.org/docs/latest/api/python", None),
        "python": ("https://docs.python.org/3", None),
    }

html_theme = "furo"
# The theme's default underlines the names of modules, as if they were links.
pygments_dark_style = "a11y-high-contrast-dark"
html_title = f"sparkdl {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False


def _link_pages(app, what, name, obj, options, lines):
    """Turn the names of pages in docstrings, such as docs/reference/glossary.md, into links."""
    lines[:] = [
        re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines
    ]


def _link_public_name(app, env, node, contnode):
    """Link a public class that a signature names by its module, such as sparkdl.settings.Network."""
    name = node["reftarget"].rpartition(".")[2]
    if name not in sparkdl.__all__ or node["reftarget"] == f"sparkdl.{name}":
        return None
    python = env.get_domain("py")
    return python.resolve_xref(
        env, node["refdoc"], app.builder, "class", f"sparkdl.{name}", node, contnode
    )


def _copy_notebooks(app, config):
    """Copy /notebooks into tutorials/, since Sphinx reads only files below docs/."""
    folder = Path(app.srcdir, NOTEBOOKS)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for notebook in Path(app.srcdir).parent.glob("notebooks/*.ipynb"):
        shutil.copy2(notebook, folder)


def _link_notebooks(app, docname, source):
    """Turn links between /notebooks and /docs into those of the copies."""
    source[0] = re.sub(r"\]\((\.\./)+notebooks/", f"](/{NOTEBOOKS}/", source[0])
    if docname.startswith(f"{NOTEBOOKS}/"):
        source[0] = source[0].replace("](../docs/", "](/")


def setup(app):
    """Register the functions of this file."""
    app.connect("autodoc-process-docstring", _link_pages)
    app.connect("missing-reference", _link_public_name)
    app.connect("config-inited", _copy_notebooks)
    app.connect("source-read", _link_notebooks)
