"""The orchestra: runs a program on the ranks of a torch.distributed group. The only package that imports torch."""
