"""Adapters for training frameworks. The core imports none of them, and importing this package imports no framework."""
