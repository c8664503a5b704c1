"""The messages of one step: the values that passes leave for passes of other ranks, over any transport.

This package knows programs, shapes and the capabilities of the transport. It imports no stage, and never asks for the class of a transport.
"""
