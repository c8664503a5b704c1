"""The Python state that a module reads, and detection of changes since the module was traced."""
