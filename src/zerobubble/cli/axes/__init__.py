"""Axes of a problem in addition to passes: a divided head, gathers of sharded weights, and offload to the host."""
