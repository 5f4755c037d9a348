"""The version of the package, which any module may import without the package's public names."""

__version__ = "0.1.0"
