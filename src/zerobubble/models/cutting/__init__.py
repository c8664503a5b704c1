"""Where a model is cut: what its parts cost, which lie together, what the user asked for, and what crosses each boundary."""
