"""Weights in shards: what gathers cost, and orders that gather seldom."""
