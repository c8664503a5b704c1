"""Steps of a pipeline: splitting the batch, the handshake, losses, hooks and profiles."""
