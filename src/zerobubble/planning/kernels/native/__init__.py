"""A small compiler for the kernels: the part of Python that they are written in, translated to LLVM in about two seconds.

A general compiler of Python (numba) takes 26 to 50 seconds of processor time for them: it infers types by search, optimizes every function
on its own and again in each of its callers, and wraps each for Python. Here types follow from the arguments in one walk over the syntax
tree, and all that an entry calls is one module, which LLVM optimizes once. `values` are the types, `emit` walks functions, `expressions`
and `lines` write what they compute, `machine` optimizes, keeps and loads, `calls` is the way in from Python, `random_numbers` are numpy's.
"""
