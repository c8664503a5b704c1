"""The backward pass in two: B gives the gradients for the inputs and leaves the weight gradients to W."""
