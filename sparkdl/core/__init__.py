"""Arithmetic and encodings that every other package may use: vectors, nested structures, bytes."""
