"""The messages of one step."""
