"""What a model is made of and how its parts hang together, found out by running the code around them without their numbers."""
