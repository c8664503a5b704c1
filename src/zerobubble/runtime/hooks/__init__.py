"""What plugs into a step: shared parameters, clipping, post-validation, measuring, planning."""
