"""The layers whose weight gradients can wait for W, and what they leave for it."""
