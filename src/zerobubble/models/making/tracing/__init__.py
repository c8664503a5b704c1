"""Traces a model whose forward is a long list of operations with torch.export, and cuts its graph between operations."""
