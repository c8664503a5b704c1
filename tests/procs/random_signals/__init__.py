"""Random signals against ranks that train: what is played and what befalls whom follow from a seed, and every outcome is judged.

`case` draws a case from its seed, `script` is what each rank runs and writes into its diary, `world` starts the processes, does the deed
and gathers what is left, and `judge` reports what should not have been. `python -m tests.procs.random_signals 17` runs the case of seed 17
alone; `--count 400` those of 400 seeds, with `--mesh` of replicas on hosts between which the cable may be cut, several worlds at a time.
"""
