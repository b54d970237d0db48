"""The version, in the one place that the package and its build read it from."""

__version__ = "0.1.0"
