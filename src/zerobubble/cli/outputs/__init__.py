"""What verbs print and draw: figures, timelines in a terminal, pages and files."""
