"""Which stages and microbatches compute their forward again, and what that buys."""
