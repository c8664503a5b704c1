"""What is to be planned, with all that a rank pays: the input of every planner, and what a solved problem is."""
