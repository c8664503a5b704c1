"""A small compiler for the kernels: translates the subset of Python that they use to LLVM, in about two seconds.

A general compiler of Python (numba) takes 26 to 50 seconds of processor time for them: it infers types by search, optimizes every function
alone and in each of its callers, and wraps each for Python. Here types follow from the arguments in one walk over the syntax tree, and an
entry with all its callees is one module, which LLVM optimizes once.

`values` are the types, `emit` walks functions, `expressions` and `lines` write their code, `machine` optimizes, stores and loads it,
`calls` is the interface to Python, and `random_numbers` are those of numpy.
"""
