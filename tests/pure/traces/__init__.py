"""Traces of real runs, without events that do not describe the pipeline. `record.py` re-records them."""
