"""How Sphinx builds these pages."""

project = "sparkdl"
author = "The sparkdl developers"
project_copyright = "the sparkdl developers, Apache License 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpick_ignore = [("py:class", "datetime.timedelta")]  # the pages of Python are not looked at
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {"description": "Train Keras models on Spark with one line."}
