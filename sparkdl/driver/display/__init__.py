"""Displays of a run's progress, one of which also fills the record of the run."""
