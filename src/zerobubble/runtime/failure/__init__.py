"""Finding out that a rank failed, and telling every rank the same: watch, report, blame."""
