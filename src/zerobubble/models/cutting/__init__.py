"""Decides where a model is cut: costs of its units, cuts given by the user, and the values that cross each boundary."""
