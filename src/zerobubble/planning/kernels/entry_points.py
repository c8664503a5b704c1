"""The entry points of the compiled kernels, imported by `load_kernels`."""

from zerobubble.planning.kernels.anneal import seed_random
from zerobubble.planning.kernels.joint_search import JointOrder, first_orders, improve_jointly
from zerobubble.planning.kernels.play import all_ranks_fit, longest_time, rows_of
from zerobubble.planning.kernels.portfolio import compile_all, search_portfolio
from zerobubble.planning.kernels.recompute_anneal import anneal_recompute
from zerobubble.planning.kernels.search_state import BudgetMeter, SearchState
from zerobubble.planning.kernels.size_aware import search_assignments
from zerobubble.planning.kernels.step_search import anneal_in_steps, step_rows
from zerobubble.planning.kernels.tables import order_of, schedule_of_order, tables_of
from zerobubble.planning.kernels.window_bound import sharper_bound

__all__ = [
    "BudgetMeter",
    "JointOrder",
    "SearchState",
    "all_ranks_fit",
    "anneal_in_steps",
    "anneal_recompute",
    "compile_all",
    "first_orders",
    "improve_jointly",
    "longest_time",
    "order_of",
    "rows_of",
    "schedule_of_order",
    "search_assignments",
    "search_portfolio",
    "seed_random",
    "sharper_bound",
    "step_rows",
    "tables_of",
]
