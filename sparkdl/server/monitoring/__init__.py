"""Observation of a run: its record, and the live page that shows it."""
