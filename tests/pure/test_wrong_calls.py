"""Wrong calls of the public surface: each is an `InputError` that names what came and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zerobubble as zb
from zerobubble import Costs, InputError, Limits, Op, Placement, Schedule, Workload, make
from zerobubble.blocks import Block, known_block, repeat
from zerobubble.bounds import lower_bounds
from zerobubble.explain import attribute, critical_path
from zerobubble.fit import fit_costs
from zerobubble.io import dumps, load_plan, load_schedule, loads, save_plan, timeline_svg, to_torch_csv
from zerobubble.level import Level
from zerobubble.lowering import prefetch_depth, program_faults
from zerobubble.offload import HostLink, Offload, RankOffloads, plan_offloads
from zerobubble.partition import Layer, balance
from zerobubble.planning import Problem, sensitivity, solve
from zerobubble.recognition import recognise
from zerobubble.schedules import Recipe, register
from zerobubble.simulation import memory_faults, peak_memory

GB = 10**9
SCHEDULE = make("zb-v", 2, 4)
COSTS = Costs.uniform(4)
WORK = Workload.uniform(2, (10, 10, 8))
LAYER = Layer(1, 1, 1, 1, 1)
PLACEMENT = Placement.vee(2)


class Tensor:
    """Stands for an array or tensor of numbers: it is no list, and `tolist` gives one."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def tolist(self) -> list[float]:
        return self.numbers


Call = Callable[[], Any]
SAVE = "save_plan: plan must be a Plan, got"
WRONG: list[tuple[Call, str]] = [
    # make, register, Recipe
    (lambda: make("zb-v"), "make: missing a required argument: 'num_ranks'; call it as make(name, num_ranks, num_microbatches, stages_"),
    (lambda: make("zb-v", 4, 8, 2, 1), "make: too many positional arguments; call it as make(name, num_ranks"),
    (lambda: make("zb-v", "4", 8), "make: num_ranks must be a whole number, got '4': write 4 without quotes"),
    (lambda: make("zb-v", 4, num_microbatches="8"), "make: num_microbatches must be a whole number, got '8': write 8 without quotes"),
    (lambda: make("zb-v", 4, 8.0), "make: num_microbatches must be a whole number, got 8.0"),
    (lambda: make("zb-v", -4, 8), "zb-v needs at least 1 rank, got -4"),
    (lambda: make("zb-v", 4, True), "make: num_microbatches must be a whole number, got True"),
    (lambda: make(SCHEDULE, 4, 8), "make: name must be a str, got a Schedule"),
    (lambda: make("zb-w", 4, 8), "there is no schedule 'zb-w': did you mean 'zb-v'?"),
    (lambda: make("interleaved-1f1b", 4, 8, grup=2), "interleaved-1f1b has no option 'grup': did you mean 'group'?"),
    (lambda: register(early_w), "register: name must be a str, got a function: write the name first, as in @schedules.register('early-w')"),
    (lambda: Recipe("mine", lambda: SCHEDULE), "schedule 'mine' needs a function of (ranks, microbatches, stages_per_rank)"),
    # simulate and what judges
    (lambda: zb.simulate(SCHEDULE), "simulate: missing a required argument: 'costs'; call it as simulate(schedule, costs)"),
    (
        lambda: zb.simulate(SCHEDULE, WORK),
        "simulate: costs must be Costs, got a Workload: workload.costs(placement) gives the costs of the stages",
    ),
    (lambda: zb.simulate("zb-v", COSTS), "schedule must be a Schedule, got 'zb-v': make('zb-v', num_ranks, num_microbatches) gives"),
    (lambda: zb.simulate(COSTS, SCHEDULE), "simulate: schedule must be a Schedule, got Costs: give the schedule first, then the costs"),
    (lambda: zb.simulate(SCHEDULE, (1, 1, 1)), "costs must be Costs, got (1, 1, 1): Costs.uniform(num_stages, times=(F, B, W))"),
    (lambda: zb.simulate(SCHEDULE, Costs.uniform(3)), "schedule 'zb-v' has 4 stages, but the costs describe 3"),
    (
        lambda: zb.schedule_faults("zb-v"),
        "schedule_faults: schedule must be a Schedule, got 'zb-v': make('zb-v', num_ranks, num_microbatches)",
    ),
    (lambda: zb.schedule_faults(solved()), "schedule_faults: schedule must be a Schedule, got a Plan: give its .schedule"),
    (lambda: program_faults(SCHEDULE), "program_faults: program must be a Program, got a Schedule: lower(schedule) gives its program"),
    (lambda: zb.lower("1f1b"), "lower: schedule must be a Schedule, got '1f1b'"),
    (lambda: zb.lower(SCHEDULE, "2"), "lower: prefetch must be a whole number, got '2': write 2 without quotes"),
    (lambda: zb.lower(SCHEDULE, -1), "prefetch must be a number of receives >= 0, got -1"),
    (lambda: prefetch_depth(SCHEDULE, WORK), "prefetch_depth: costs must be Costs, got a Workload"),
    (lambda: peak_memory(SCHEDULE, None), "peak_memory: costs must be Costs, got None"),
    (lambda: peak_memory(SCHEDULE, zb.Costs.uniform(1)), "has 4 stages, but the costs describe 1"),
    (lambda: memory_faults(SCHEDULE, COSTS, 40 * GB), "limits must be Limits, got 40000000000: Limits((40000000000,) * num_ranks) gives"),
    (lambda: memory_faults(SCHEDULE, COSTS, "40GB"), "limits must be Limits, got '40GB': Limits((40 * 10**9,) * num_ranks) gives 40 GB"),
    (lambda: zb.picture("zb-v"), "picture: schedule must be a Schedule, got 'zb-v'"),
    (lambda: recognise(SCHEDULE.rows), "recognise: schedule must be a Schedule, got"),
    (
        lambda: zb.diff(SCHEDULE, COSTS, SCHEDULE),
        "diff: run must be a Timeline, got a Schedule: simulate(schedule, costs) gives its timeline",
    ),
    (lambda: attribute(SCHEDULE, WORK), "attribute: costs must be Costs, got a Workload"),
    (lambda: attribute(SCHEDULE, COSTS, "bubble"), "idle time is counted against 'makespan' or 'span', got 'bubble'"),
    (lambda: critical_path(SCHEDULE), "critical_path: timeline must be a Timeline, got a Schedule"),
    (lambda: fit_costs(SCHEDULE), "fit_costs: timeline must be a Timeline, got a Schedule"),
    # plan and its kin
    (
        lambda: zb.plan((10, 10, 8), 8),
        "work must be a Workload or Costs or a list or tuple of Layer, got (10, 10, 8): Workload.uniform(num_ranks, times=(F, B, W))",
    ),
    (lambda: zb.plan(WORK), "plan: missing a required argument: 'num_microbatches'"),
    (lambda: zb.plan(WORK, "8"), "plan: num_microbatches must be a whole number, got '8': write 8 without quotes"),
    (lambda: zb.plan(WORK, 0), "a plan needs at least 1 microbatch, got 0"),
    (lambda: zb.plan(WORK, 8, memory="40GB"), "memory must be a number of microbatches or Limits, or None, got '40GB': Limits("),
    (lambda: zb.plan(COSTS, 8, memory=40 * GB, placements=PLACEMENT), "memory is in bytes: give Limits, one number for each rank"),
    (
        lambda: zb.plan(WORK, 8, limits=40 * GB),
        "plan: got an unexpected keyword argument 'limits'; call it as plan(work, num_microbatches",
    ),
    (lambda: zb.plan(WORK, 8, placements=4), "plan: placements must be"),
    (lambda: zb.plan(WORK, 8, placements=[4]), "each of the placements must be a str or a Placement, got 4: Placement.linear(4)"),
    (lambda: zb.plan(WORK, 8, memory=1e300), "the memory limit of rank 0 must be at most 5e+18 bytes, got 12000"),
    (lambda: zb.plan(WORK, 8, head=(1, 1, 1)), "plan: head must be a Head, or None, got (1, 1, 1)"),
    (lambda: zb.plan(WORK, 8, host=25e9), "plan: host must be a HostLink, or None, got 25000000000.0"),
    (lambda: zb.plan(WORK, 8, placements="vie"), "there is no placement 'vie': did you mean 'vee'?"),
    (lambda: zb.plan(WORK, 8, objective="time"), "there is no objective 'time': give period or makespan"),
    (lambda: zb.plan(WORK, 8, seconds="5"), "plan: seconds must be a number, got '5': write 5 without quotes"),
    (lambda: zb.plan(WORK, 8, seconds=-1), "seconds to search must be a finite number >= 0, got -1"),
    (lambda: zb.plan(WORK, 8, baseline="zb"), "there is no"),
    (lambda: solve(WORK), "solve: problem must be a Problem, got a Workload: plan(workload, num_microbatches) plans it"),
    (lambda: sensitivity(SCHEDULE, COSTS, "0.1"), "sensitivity: error must be a number, got '0.1'"),
    (lambda: zb.plan([LAYER] * 4, 8, placements="vee"), "layers do not say how many ranks there are: give placements such as"),
    (lambda: zb.plan([(1, 1, 1)] * 4, 8, placements=PLACEMENT), "a list or tuple of Layer, got"),
    (lambda: zb.plan([LAYER] * 4, 8, "40GB", placements=PLACEMENT), "plan: memory must be a number of microbatches or Limits, or None"),
    (lambda: zb.plan([], 8, placements=PLACEMENT), "a list or tuple of Layer, got []"),
    (lambda: balance([1, 2, 3], 2), "balance: layers must be a list or tuple of Layer, got [1, 2, 3]"),
    (
        lambda: lower_bounds("vee", 8, COSTS, None),
        "lower_bounds: placement must be a Placement, got 'vee': write Placement.linear(num_ranks)",
    ),
    # values
    (lambda: Placement.linear("4"), "Placement.linear: num_ranks must be a whole number, got '4': write 4 without quotes"),
    (lambda: Placement.vee(0), "a pipeline needs at least 1 rank, got 0"),
    (lambda: Placement.vee(-2), "a pipeline needs at least 1 rank, got -2"),
    (lambda: Placement.custom(0, 1, 0), "a route, the ranks of its stages, must be a list or tuple, got 0"),
    (lambda: Placement.custom(("0", "1")), "the rank of a stage must be a whole number, got '0': write 0 without quotes"),
    (lambda: Schedule("mine", "linear", 1, ((),)), "placement of a schedule must be a Placement, got 'linear'"),
    (lambda: Schedule("mine", Placement.linear(1), 1, ["0F0 0B0"]), "the passes of a rank must be a list or tuple, got '0F0 0B0'"),
    (lambda: Schedule("mine", Placement.linear(1), 1, [["0F0"]]), "must be an Op, got '0F0': Op.parse('0F0') reads a pass"),
    (lambda: Schedule(7, Placement.linear(1), 1, [[]]), "the name of a schedule must be a str, got 7"),
    (lambda: Schedule("mine", Placement.linear(1), 1.0, [[]]), "num_microbatches of a schedule must be a whole number, got 1.0"),
    (lambda: Schedule.from_text(SCHEDULE), "Schedule.from_text: text must be a str, got a Schedule"),
    (lambda: Op.parse("F0"), "'F0' is not a pass; write <stage><kind><microbatch>"),
    (lambda: Costs.uniform("4"), "Costs.uniform: num_stages must be a whole number, got '4'"),
    (lambda: Costs.uniform(4, (10, 10)), "times must be three numbers, the times of F, B and W in ms, got (10, 10)"),
    (lambda: Costs.uniform(4, 10), "times must be three numbers, the times of F, B and W in ms, got 10"),
    (lambda: Costs.uniform(4, ("10", "10", "8")), "times must be three numbers, the times of F, B and W in ms, got ('10', '10', '8')"),
    (lambda: Costs.uniform(4, stages_per_rank=0), "stages_per_rank must be at least 1, got 0"),
    (
        lambda: Costs.from_ms(Tensor(1, 1), [1, 1], [1, 1]),
        "forward of the costs must be a list or tuple, got a Tensor: value.tolist() gives",
    ),
    (lambda: Costs.from_ms([1, "1"], [1, 1], [1, 1]), "forward of stage 1 must be a finite number, got '1'"),
    (lambda: Costs.from_ms([1, 1], [1, 1], [1]), "costs for 2 stages need 2 values of weight, got 1"),
    (lambda: Costs.from_ms(1, 1, 1), "forward of the costs must be a list or tuple, got 1"),
    (
        lambda: Costs((1.5,), (1,), (1,), (), (1,), (1,)),
        "forward of stage 0 must be a whole number of ns or bytes, got 1.5: see Costs.from_ms",
    ),
    (lambda: Costs((-1,), (1,), (1,), (), (1,), (1,)), "forward of stage 0 must not be negative, got -1"),
    (lambda: Costs.from_dict(SCHEDULE.to_dict()), "expected the format"),
    (lambda: COSTS.with_columns(hidden=3), "hidden of the costs must be a list or tuple, got 3"),
    (lambda: COSTS.with_level(3, (1,) * 4, (1,) * 4), "the name of a level of recomputation must be a str, got 3"),
    (lambda: COSTS.with_recompute(["full"] * 4), "each of the levels of recomputation must be a Level, got 'full'"),
    (lambda: Level("two\nlines", 1, 0.1), "the name of a level of recomputation must be one line of printable text, got 'two\\nlines'"),
    (lambda: Level("", 1, 0.1), "the name of a level of recomputation must be one line of printable text, got ''"),
    (
        lambda: Limits(40 * GB),
        "memory of Limits must be a list or tuple with the bytes of each rank, got 40000000000: Limits((40000000000,) * num_ranks)",
    ),
    (lambda: Limits(("40GB",)), "the memory limit of rank 0, in bytes, must be a whole number, got '40GB'"),
    (lambda: Limits((2**70,)), "the memory limit of rank 0 must be at most 5e+18 bytes, got 1180591620717411303424"),
    (lambda: Limits((0,)), "the memory limit of rank 0 must be positive, got 0"),
    (lambda: Workload.uniform(8, 10), "times must be three numbers, the times of F, B and W in ms, got 10"),
    (lambda: Workload.from_ms([1, 1], [1, 1], [1, 1], 0.2), "comm of the workload must be a list or tuple, got 0.2"),
    (lambda: WORK.costs("vee"), "Workload.costs: placement must be a Placement, got 'vee'"),
    (lambda: WORK.costs(Placement.vee(4)), "the workload is for 2 ranks, the placement for 4"),
    (lambda: WORK.limits("40GB"), "Workload.limits: microbatches must be a number, got '40GB'"),
    (lambda: Problem("vee", 8, COSTS, Limits((1, 1))), "placement of a Problem must be a Placement, got 'vee'"),
    (lambda: Problem(PLACEMENT, 8, WORK, Limits((1, 1))), "costs of a Problem must be Costs, got a Workload"),
    (lambda: Problem(PLACEMENT, 8, COSTS, 40 * GB), "limits of a Problem must be Limits, got 40000000000"),
    (lambda: Layer(1.5, 1, 1, 1, 1), "forward of a layer must be a whole number >= 0 of ns or bytes, got 1.5"),
    (lambda: Layer("1", 1, 1, 1, 1), "forward of a layer must be a whole number >= 0 of ns or bytes, got '1'"),
    (lambda: repeat("zb-v", 8), "repeat: block must be a Block, got 'zb-v': blocks.known_block('zb-v', num_ranks) gives a published one"),
    (lambda: known_block("zb", 4), "there is no"),
    (lambda: Block.of("mine", PLACEMENT, 6, 3), "a path of block 'mine', slot after slot, must be a list or tuple, got 3"),
    (lambda: RankOffloads((Offload(0, 1, 1, 1.5, 4, 5),), 0, 0, 0, 0), "gone of an offload must be a whole number, got 1.5"),
    (lambda: RankOffloads(((0, 1, 1, 2, 4, 5),), 0, 0, 0, 0), "each of the offloads of a rank must be an Offload, got (0, 1, 1, 2, 4, 5)"),
    (lambda: RankOffloads(None, 0, 0, 0, 0), "offloads of a rank must be a list or tuple of Offload, got None"),
    (
        lambda: plan_offloads(SCHEDULE, COSTS, Limits((1, 1)), HostLink(1, 1), rounds=-1),
        "rounds of plan_offloads must be at least 0, got -1",
    ),
    # files
    (lambda: dumps("zb-v"), "dumps: value must be"),
    (lambda: loads(SCHEDULE), "loads: text must be a str, got a Schedule"),
    (lambda: load_schedule(7), "load_schedule: text must be a str, got 7"),
    (lambda: load_plan(SCHEDULE), "load_plan: file must be a str or a Path, got a Schedule"),
    (
        lambda: save_plan("plan.json", solved()),
        f"{SAVE} 'plan.json': give the plan first",
    ),
    (lambda: save_plan(SCHEDULE, "plan.json"), f"{SAVE} a Schedule"),
    (lambda: timeline_svg([zb.simulate(SCHEDULE, COSTS)]), "timelines must be a list or tuple of Timeline, got"),
    (lambda: to_torch_csv("zb-v"), "to_torch_csv: schedule must be a Schedule, got 'zb-v'"),
]


def early_w(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return make("1f1b", ranks, microbatches)


def solved() -> Any:
    return solve(Problem(PLACEMENT, 4, COSTS, Limits((8_000_000,) * 2)), seconds=0)


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_a_wrong_call_is_an_input_error_with_the_value_and_the_remedy(call: Call, message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists_serve_where_tuples_are_kept() -> None:
    """What comes out is equal to the value of tuples, and can be a key of a dict."""
    rows = [[Op.parse("0F0"), Op.parse("0BW0")]]
    pairs = [
        (Costs([1, 2], [1, 2], [1, 2], [0], [1, 1], [1, 1]), Costs((1, 2), (1, 2), (1, 2), (0,), (1, 1), (1, 1))),
        (Limits([1, 2]), Limits((1, 2))),
        (Workload([1], [1], [1], [1], [1], [1]), Workload((1,), (1,), (1,), (1,), (1,), (1,))),
        (Placement("custom", 2, [[0, 1]]), Placement.custom((0, 1))),
        (Placement.custom([0, 1]), Placement.custom((0, 1))),
        (Schedule("one", Placement.linear(1), 1, rows), Schedule("one", Placement.linear(1), 1, tuple(map(tuple, rows)))),
        (Costs.uniform(2, [10, 10, 8]), Costs.uniform(2, (10, 10, 8))),
        (Costs.from_ms((1, 2), range(1, 3), [1, 2]), Costs.from_ms([1, 2], [1, 2], [1, 2])),
    ]
    for from_lists, from_tuples in pairs:
        assert from_lists == from_tuples
        assert len({from_lists, from_tuples}) == 1
