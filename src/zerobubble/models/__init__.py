"""A model that was not written for pipelining, cut into stages: its own forward runs on every stage, and nothing of it is rewritten.

The law: what a model does between its parts is known to nobody but its own code, so that code runs on every stage. The parts that other
stages hold, its `units`, are replaced by stand-ins. A stand-in gives what came from the stage before where the real part's output is
needed, and zeros of the same shape where it is not; which of the two is the case, `dataflow` finds out by running the model once. So no
names of layers, and no habits of a library of models, are written down here.
"""
