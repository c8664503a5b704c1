"""Creates models from functions, configurations and exported programs, with only the weights of a rank's own stages."""
