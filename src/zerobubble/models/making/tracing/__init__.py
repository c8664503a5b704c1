"""A model whose forward is a long list of operations: traced by torch.export, and its graph cut between operations."""
