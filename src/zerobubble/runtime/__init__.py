"""Runs a program on the ranks of a torch.distributed group. With the models built on it, the only package that imports torch."""
