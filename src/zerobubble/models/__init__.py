"""A model that was not written for pipelining, cut into stages: its own forward runs on every stage, and nothing of it is rewritten.

The law: what a model does between its parts is known to nobody but its own code, so that code runs on every stage. The parts, its `units`,
belong to one stage each, and on others stand-ins give what came over the boundary where it is needed, and NaN where it is not. Which is
the case is found out by running the code around the units and following every tensor (`observation`), so neither names of layers nor
habits of a library of models are written down here.
"""
