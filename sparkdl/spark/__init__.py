"""Spark: the application and its slots, the jobs on it, and what their failures mean."""
