"""The stages of a cut model: the model's own code, with stand-ins for units of other stages."""
