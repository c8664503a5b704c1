"""The outputs of commands: figures, timelines in a terminal, pages and files."""
