"""The messages of one step: values that passes leave for passes of other ranks, over any transport.

It knows programs, shapes and the transport's capabilities; it imports no stage, and asks no transport for its class.
"""
