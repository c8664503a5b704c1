"""The state of Python that a module reads, and whether it is what it was when the module was traced."""
