"""The messages of one step, over any transport: the values that passes make for passes of other ranks.

This package knows programs, shapes and the capabilities of the transport. It imports no stage, and never asks for the class of a transport.
"""
