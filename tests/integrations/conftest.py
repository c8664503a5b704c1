"""Leaves out the tests of frameworks that are not installed."""

from importlib.util import find_spec

NEEDED = {"test_lightning.py": "lightning"}
collect_ignore = [file for file, framework in NEEDED.items() if find_spec(framework) is None]
