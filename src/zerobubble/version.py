"""The version of the package, which pyproject.toml and every layer read here."""

__version__ = "0.1.0"
