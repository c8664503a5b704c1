"""The input of the planner: costs, limits and axes on one placement, with their validation and bounds."""
