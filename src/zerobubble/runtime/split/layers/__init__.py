"""Layers whose weight gradients can be deferred to W, and the work they queue for it."""
