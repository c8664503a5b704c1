"""Microbatches of unequal costs: their order, and plans for them."""
