"""How Sphinx builds these pages."""

project = "sparkdl"
author = "The sparkdl developers"
project_copyright = "the sparkdl developers, Apache License 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {"description": "Train Keras models on Spark with one line."}
