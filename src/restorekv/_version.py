"""The version of the package, where every module can read it without importing the package's names."""

__version__ = "0.1.0"
