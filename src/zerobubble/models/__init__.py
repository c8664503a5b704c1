"""Cuts a model that was not written for pipelining into stages, without rewriting it.

Only the model's own code defines how its parts are connected, so every stage runs that code. Each part (a `unit`) belongs to one stage. On
all other stages, a stand-in replaces the unit: it returns the unit's output received over the boundary where that is needed, and NaN where
it is not. Which case applies is determined by running the code around the units and following every tensor (package `observation`). So
nothing here depends on names of layers or on the usage patterns of a model library.
"""
