"""Graphs of torch.fx: read, cut into B and W, and made to serve inputs of all sizes. No module is run here."""
