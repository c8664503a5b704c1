"""The compiled part of the planner: simulator, list scheduler and annealing, and the search that drives them. Needs numba."""

from zerobubble.planning.kernels.desk import Budget, Desk
from zerobubble.planning.kernels.noise import steadied
from zerobubble.planning.kernels.play import all_fit, rows_of, time_of
from zerobubble.planning.kernels.portfolio import rehearse, run
from zerobubble.planning.kernels.tables import schedule_of, tables_of, word_of

__all__ = ["Budget", "Desk", "all_fit", "rehearse", "rows_of", "run", "schedule_of", "steadied", "tables_of", "time_of", "word_of"]
