"""Traces of real runs, without the events that do not tell of the pipeline. `record.py` records them again."""
