"""What one step is made of: cutting the batch, the handshake, the losses."""
