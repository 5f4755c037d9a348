"""Arithmetic and encodings for all other packages: vectors, nested structures, bytes."""
