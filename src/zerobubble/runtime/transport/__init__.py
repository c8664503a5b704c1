"""How bytes get from rank to rank: process groups of torch.distributed, and shared memory within a machine."""
