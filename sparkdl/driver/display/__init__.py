"""Displays of a run, and the record that its live page and its report show."""
