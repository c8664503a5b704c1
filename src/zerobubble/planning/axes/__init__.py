"""The axes of a plan, a file each."""
