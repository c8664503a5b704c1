"""Where the head of a language model runs: on the last stage, or divided over the ranks."""
