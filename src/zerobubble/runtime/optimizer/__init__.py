"""The optimizer's side of a step: what all ranks must know of the gradients before they use them."""
