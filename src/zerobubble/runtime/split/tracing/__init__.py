"""Traces a module into graphs for F, B and W: one trace for each kind of input and each Python state."""
