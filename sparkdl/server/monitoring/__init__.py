"""Observation of a run: its record, the live page that shows it, and its metrics."""
