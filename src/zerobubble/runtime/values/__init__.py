"""Values at stage boundaries: payloads, their shapes, and the sums of gradients."""
