"""How Sphinx builds these pages."""

project = "sparkdl"
author = "The sparkdl developers"
project_copyright = "the sparkdl developers, Apache License 2.0"

extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {"description": "Train Keras models on Spark with one line."}

# index.md lists the pages in their order as patterns, so that it never names one that is not there.
suppress_warnings = ["toc.empty_glob"]
