"""The compiled part of the planner: simulator, list scheduler and annealing, and the search that drives them. Needs numba."""

from zerobubble.plan.kernels.desk import Budget, Desk
from zerobubble.plan.kernels.noise import steadied
from zerobubble.plan.kernels.play import all_fit, rows_of, time_of
from zerobubble.plan.kernels.portfolio import rehearse, run
from zerobubble.plan.kernels.tables import schedule_of, tables_of, word_of

__all__ = ["Budget", "Desk", "all_fit", "rehearse", "rows_of", "run", "schedule_of", "steadied", "tables_of", "time_of", "word_of"]
