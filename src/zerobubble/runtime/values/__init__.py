"""What crosses a stage boundary: payloads, their shapes, and where gradients are summed."""
