"""Finds out how the parts of a model are connected, by running the code around them without their weights."""
