"""A module traced into the graphs of its F, B and W, one trace for each kind of input and state of Python."""
