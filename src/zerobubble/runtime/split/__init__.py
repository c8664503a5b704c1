"""Splits the backward pass in two: B computes input gradients, W computes weight gradients."""
