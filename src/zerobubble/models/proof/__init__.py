"""Verifies that a cut model computes the same as the uncut one, on the model itself or on a tiny one of its class."""
