"""The results of a fit for a user: its History, plots, and the text of a SparkModel."""
