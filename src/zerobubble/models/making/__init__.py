"""What is given in the place of a model, made into one: functions, configurations and exported programs, each stage's numbers alone."""
