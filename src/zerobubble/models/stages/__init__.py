"""One stage of a cut model: the model's own code, with stand-ins for what other stages hold."""
