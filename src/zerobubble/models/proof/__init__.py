"""The proof that a cut gives what the model gives, on the model itself or on a tiny one of its class."""
