"""Wrong calls of public functions: each raises an `InputError` that names the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, isfunction, signature
from typing import Any

import pytest

import zerobubble as zb
from docs.public_names import namespaces
from tests.refusals import Stated, raises, states
from zerobubble import Costs, InputError, Limits, Op, Placement, Schedule, Workload, make
from zerobubble.arguments import COUNT, NUMBER, Wanted, each, either, faults_among, function, instance, optional, require, takes
from zerobubble.blocks import Block, known_block, repeat
from zerobubble.bounds import lower_bounds
from zerobubble.errors import nearest
from zerobubble.explain import attribute, critical_path
from zerobubble.fit import fit_costs
from zerobubble.io import dumps, load_plan, load_schedule, loads, save_plan, timeline_svg, to_torch_csv
from zerobubble.level import Level
from zerobubble.lowering import prefetch_depth, program_faults
from zerobubble.offload import HostLink, Offload, RankOffloads, plan_offloads
from zerobubble.partition import Layer, balance
from zerobubble.planning import Problem, sensitivity, solve
from zerobubble.recognition import recognize
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
WRONG: list[tuple[Call, Stated]] = [
    # make, register, Recipe
    (lambda: make("zb-v"), ("make", "missing", "'num_ranks'")),
    (lambda: make("zb-v", 4, 8, 2, 1), ("make", "num_ranks", "positional")),
    (lambda: make("zb-v", "4", 8), ("make", "num_ranks", "4", 4)),
    (lambda: make("zb-v", 4, num_microbatches="8"), ("make", "num_microbatches", "8", 8)),
    (lambda: make("zb-v", 4, 8.0), ("make", "num_microbatches", "8.0")),
    (lambda: make("zb-v", -4, 8), ("zb-v", 1, -4)),
    (lambda: make("zb-v", 4, True), ("make", "num_microbatches", "True")),
    (lambda: make(SCHEDULE, 4, 8), ("make", "name", "Schedule")),
    (lambda: make("zb-w", 4, 8), ("zb-w", "zb-v")),
    (lambda: make("zb-x", 4, 8), ("zb-x", "'zb-h1'", "'zb-h2'", "'zb-v'")),
    (lambda: make("zb", 4, 8), ("zb", "'zb-h1'", "'zb-h2'", "'zb-v'")),
    (lambda: make("zb-v", 4.0, 8), ("make", "num_ranks", "4.0", "4")),
    (lambda: make("interleaved-1f1b", 4, 8, grup=2), ("interleaved-1f1b", "grup", "group")),
    (lambda: register(early_w), ("register", "name", "a function", "schedules.register", "early-w")),
    (lambda: Recipe("mine", lambda: SCHEDULE), ("mine", "stages_per_rank")),
    # simulate and what judges
    (lambda: zb.simulate(SCHEDULE), ("simulate", "missing", "'costs'")),
    (
        lambda: zb.simulate(SCHEDULE, WORK),
        ("simulate", "costs", "Workload", "workload.costs"),
    ),
    (lambda: zb.simulate("zb-v", COSTS), ("simulate", "schedule", "zb-v", "num_ranks")),
    (lambda: zb.simulate(COSTS, SCHEDULE), ("simulate", "schedule", "Costs")),
    (lambda: zb.simulate(SCHEDULE, (1, 1, 1)), ("costs", "(1, 1, 1)", "Costs.uniform", "num_stages")),
    (lambda: zb.simulate(SCHEDULE, Costs.uniform(3)), ("zb-v", 4, 3)),
    (
        lambda: zb.schedule_faults("zb-v"),
        ("schedule_faults", "schedule", "zb-v", "num_ranks"),
    ),
    (lambda: zb.schedule_faults(solved()), ("schedule_faults", "schedule", "Plan")),
    (lambda: program_faults(SCHEDULE), ("program_faults", "program", "Schedule")),
    (lambda: zb.lower("1f1b"), ("lower", "schedule", "1f1b")),
    (lambda: zb.lower(SCHEDULE, "2"), ("lower", "prefetch", "2", 2)),
    (lambda: zb.lower(SCHEDULE, -1), ("prefetch", -1)),
    (lambda: prefetch_depth(SCHEDULE, WORK), ("prefetch_depth", "costs", "Workload")),
    (lambda: peak_memory(SCHEDULE, None), ("peak_memory", "costs", "None")),
    (lambda: peak_memory(SCHEDULE, zb.Costs.uniform(1)), (4, 1, "stages", "costs")),
    (lambda: memory_faults(SCHEDULE, COSTS, 40 * GB), ("limits", 40000000000, "Limits", "(40000000000,)")),
    (lambda: memory_faults(SCHEDULE, COSTS, "40GB"), ("limits", "40GB", "Limits", 40)),
    (lambda: zb.picture("zb-v"), ("picture", "schedule", "zb-v")),
    (lambda: recognize(SCHEDULE.rows), ("recognize", "schedule")),
    (
        lambda: zb.diff(SCHEDULE, COSTS, SCHEDULE),
        ("diff", "run", "Schedule"),
    ),
    (lambda: attribute(SCHEDULE, WORK), ("attribute", "costs", "Workload")),
    (lambda: attribute(SCHEDULE, COSTS, "bubble"), ("makespan", "span", "bubble")),
    (lambda: critical_path(SCHEDULE), ("critical_path", "timeline", "Schedule")),
    (lambda: fit_costs(SCHEDULE), ("fit_costs", "timeline", "Schedule")),
    # plan and its kin
    (
        lambda: zb.plan((10, 10, 8), 8),
        ("work", "(10, 10, 8)", "Workload.uniform", "num_ranks"),
    ),
    (lambda: zb.plan(WORK), ("plan", "num_microbatches", "required")),
    (lambda: zb.plan(WORK, "8"), ("plan", "num_microbatches", "8", 8)),
    (lambda: zb.plan(WORK, 0), ("num_microbatches", 0)),
    (lambda: zb.plan(COSTS, 0), ("num_microbatches", 0)),
    (lambda: zb.schedules.zb_v("4", 8), ("zb_v", "ranks", "4")),
    (lambda: zb.schedules.gpipe(4, 0), ("gpipe", "microbatches", 0)),
    (lambda: make("plan.json", 4, 8), ("plan.json", "io.load_plan")),
    (lambda: zb.plan(WORK, 8, memory="40GB"), ("memory", "40GB", "Workload")),
    (lambda: zb.plan(COSTS, 8, memory=40 * GB, placements=PLACEMENT), ("memory", 40000000000, "40GB")),
    (
        lambda: zb.plan(WORK, 8, limits=40 * GB),
        ("plan", "limits", "num_microbatches"),
    ),
    (lambda: zb.plan(WORK, 8, placements=4), ("plan", "placements", 4)),
    (lambda: zb.plan(WORK, 8, placements=[4]), ("placements", 4, "Placement.linear", "(4)")),
    (lambda: zb.plan(WORK, 8, memory=1e300), ("memory", 1e300, "40GB")),
    (lambda: zb.plan(WORK, 8, head=(1, 1, 1)), ("plan", "head", "(1, 1, 1)")),
    (lambda: zb.plan(WORK, 8, host=25e9), ("plan", "host", "25000000000.0")),
    (lambda: zb.plan(WORK, 8, placements="vie"), ("vie", "vee")),
    (lambda: zb.plan(WORK, 8, objective="time"), ("time", "objective", "period")),
    (lambda: zb.plan(WORK, 8, seconds="5"), ("plan", "seconds", "5", 5)),
    (lambda: zb.plan(WORK, 8, seconds=-1), ("seconds", "finite", -1)),
    (lambda: zb.plan(WORK, 8, baseline="zb"), ("baseline", "zb", "zb-v-greedy")),
    (lambda: solve(WORK), ("solve", "problem", "Workload", "num_microbatches")),
    (lambda: sensitivity(SCHEDULE, COSTS, "0.1"), ("sensitivity", "error", "0.1")),
    (lambda: zb.plan([LAYER] * 4, 8, placements="vee"), ("placements", "ranks")),
    (lambda: zb.plan([(1, 1, 1)] * 4, 8, placements=PLACEMENT), ("Layer", "(1, 1, 1)")),
    (lambda: zb.plan([LAYER] * 4, 8, "40 apples", placements=PLACEMENT), ("plan", "memory", "40 apples", "40GB")),
    (lambda: zb.plan([], 8, placements=PLACEMENT), ("Layer", "[]")),
    (lambda: balance([1, 2, 3], 2), ("balance", "layers", "[1, 2, 3]")),
    (
        lambda: lower_bounds("vee", 8, COSTS, None),
        ("lower_bounds", "placement", "vee", "Placement.linear", "num_ranks"),
    ),
    # values
    (lambda: Placement.linear("4"), ("Placement.linear", "num_ranks", "4", 4)),
    (lambda: Placement.vee(0), ("pipeline", "1 rank", 0)),
    (lambda: Placement.vee(-2), ("pipeline", "1 rank", -2)),
    (lambda: Placement.custom(0, 1, 0), ("route", "ranks", "stages", 0)),
    (lambda: Placement.custom(("0", "1")), ("rank", "stage", "number", "'0'")),
    (lambda: Schedule("mine", "linear", 1, ((),)), ("placement", "schedule", "linear")),
    (lambda: Schedule("mine", Placement.linear(1), 1, ["0F0 0B0"]), ("passes", "rank", "'0F0 0B0'")),
    (lambda: Schedule("mine", Placement.linear(1), 1, [["0F0"]]), ("Op", "0F0", "Op.parse")),
    (lambda: Schedule(7, Placement.linear(1), 1, [[]]), ("name", "schedule", 7)),
    (lambda: Schedule("mine", Placement.linear(1), 1.0, [[]]), ("num_microbatches", "schedule", "1.0")),
    (lambda: Schedule.from_text(SCHEDULE), ("Schedule.from_text", "text", "Schedule")),
    (lambda: Op.parse("F0"), ("F0", "<stage><kind><microbatch>")),
    (lambda: Costs.uniform("4"), ("Costs.uniform", "num_stages", "4")),
    (lambda: Costs.uniform(4, (10, 10)), ("times", "(10, 10)")),
    (lambda: Costs.uniform(4, 10), ("Costs.uniform", "times", 10)),
    (lambda: Costs.uniform(4, ("10", "10", "8")), ("times", "('10', '10', '8')")),
    (lambda: Costs.uniform(4, stages_per_rank=0), ("stages_per_rank", 0)),
    (
        lambda: Costs.from_ms(Tensor(1, 1), [1, 1], [1, 1]),
        ("forward", "costs", "Tensor", "value.tolist"),
    ),
    (lambda: Costs.from_ms([1, "1"], [1, 1], [1, 1]), ("stage 1", "forward", "1")),
    (lambda: Costs.from_ms([1, 1], [1, 1], [1]), ("2 stages", "weight", 1)),
    (lambda: Costs.from_ms(1, 1, 1), ("forward", "costs", 1)),
    (
        lambda: Costs((1.5,), (1,), (1,), (), (1,), (1,)),
        ("stage 0", "forward", "1.5", "Costs.from_ms"),
    ),
    (lambda: Costs((-1,), (1,), (1,), (), (1,), (1,)), ("stage 0", "forward", -1)),
    (lambda: Costs.from_dict(SCHEDULE.to_dict()), ("'zerobubble schedule 1'", "format")),
    (lambda: COSTS.with_columns(hidden=3), ("hidden", "costs", 3)),
    (lambda: COSTS.with_level(3, (1,) * 4, (1,) * 4), ("name", "level", "recomputation", 3)),
    (lambda: COSTS.with_recompute(["full"] * 4), ("levels", "recomputation", "full")),
    (lambda: Level("two\nlines", 1, 0.1), ("name", "level", "recomputation", "'two\\nlines'")),
    (lambda: Level("", 1, 0.1), ("name", "level", "recomputation", "''")),
    (
        lambda: Limits(40 * GB),
        ("Limits", "memory", 40000000000, "(40000000000,)"),
    ),
    (lambda: Limits(("40GB", "40")), ("rank 1", "memory", "limit", "40", "40GB")),
    (lambda: Limits((2**70,)), ("rank 0", "memory", "limit", 1180591620717411303424)),
    (lambda: Limits((0,)), ("rank 0", "memory", "positive", 0)),
    (lambda: Limits(-3), ("memory", -3, "('40GB',)")),
    (lambda: Limits(0.1), ("memory", 0.1, "('40GB',)")),
    (lambda: Limits("9XB"), ("memory", "9XB", "('40GB',)")),
    (lambda: zb.plan(WORK, 8, "9XB"), ("memory", "9XB", "40GB", "Limits")),
    (lambda: Costs.uniform(7, stages_per_rank=2), ("num_stages", 7, 2)),
    (lambda: zb.plan(WORK, -4.0), ("num_microbatches", -4.0)),
    (lambda: Limits(-3), ("memory", -3, "40GB")),  # type: ignore[arg-type]
    (lambda: Limits(0.1), ("memory", 0.1, "40GB")),  # type: ignore[arg-type]
    (lambda: zb.plan(Costs.uniform(8, stages_per_rank=2), 8), ("Placement.vee(4)", "Placement.linear(8)")),
    (lambda: zb.plan(Costs.uniform(7), 8), ("Placement.linear(7)",)),
    (lambda: Workload.uniform(8, 10), ("Workload.uniform", "times", 10)),
    (lambda: Workload.from_ms([1, 1], [1, 1], [1, 1], 0.2), ("comm", "workload", "0.2")),
    (lambda: WORK.costs("vee"), ("Workload.costs", "placement", "vee")),
    (lambda: WORK.costs(Placement.vee(4)), ("workload", "placement", 2, 4)),
    (lambda: WORK.limits("40GB"), ("Workload.limits", "microbatches", "40GB")),
    (lambda: Problem("vee", 8, COSTS, Limits((1, 1))), ("Problem", "placement", "vee")),
    (lambda: Problem(PLACEMENT, 8, WORK, Limits((1, 1))), ("Problem", "costs", "Workload")),
    (lambda: Problem(PLACEMENT, 8, COSTS, 40 * GB), ("Problem", "limits", 40000000000)),
    (lambda: Layer(1.5, 1, 1, 1, 1), ("forward", "layer", "1.5")),
    (lambda: Layer("1", 1, 1, 1, 1), ("forward", "layer", "1")),
    (lambda: repeat("zb-v", 8), ("repeat", "block", "zb-v", "blocks.known_block")),
    (lambda: known_block("zb", 4), ("zb", "block")),
    (lambda: Block.from_paths("mine", PLACEMENT, 6, 3), ("mine", "path", "block", "slot", 3)),
    (lambda: RankOffloads((Offload(0, 1, 1, 1.5, 4, 5),), 0, 0, 0, 0), ("freed", "offload", "1.5")),
    (lambda: RankOffloads(((0, 1, 1, 2, 4, 5),), 0, 0, 0, 0), ("offloads", "rank", "(0, 1, 1, 2, 4, 5)")),
    (lambda: RankOffloads(None, 0, 0, 0, 0), ("offloads", "rank", "None")),
    (
        lambda: plan_offloads(SCHEDULE, COSTS, Limits((1, 1)), HostLink(1, 1), rounds=-1),
        ("plan_offloads", "rounds", -1),
    ),
    # pipelines: also what is wrong without a process group, and of many parameters those that were meant
    (lambda: zb.Pipeline([], "zb-v", "8", len), ("num_microbatches", "8", "torch.distributed.init_process_group")),
    (lambda: zb.Pipeline([], "zb-v", 8, len, hook=()), ("hook", "hooks", "loss_fn")),
    # files
    (lambda: dumps("zb-v"), ("dumps", "value", "zb-v")),
    (lambda: loads(SCHEDULE), ("loads", "text", "Schedule")),
    (lambda: load_schedule(7), ("load_schedule", "file", 7)),
    (lambda: load_schedule("plan.csv"), ("read", "plan.csv")),
    (lambda: load_plan(SCHEDULE), ("load_plan", "file", "Schedule")),
    (
        lambda: save_plan("plan.json", solved()),
        ("save_plan", "plan.json", "plan"),
    ),
    (lambda: save_plan(SCHEDULE, "plan.json"), ("save_plan", "Schedule")),
    (lambda: timeline_svg([zb.simulate(SCHEDULE, COSTS)]), ("Timeline", "timelines")),
    (lambda: to_torch_csv("zb-v"), ("to_torch_csv", "schedule", "zb-v")),
]


def early_w(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return make("1f1b", ranks, microbatches)


def solved() -> Any:
    return solve(Problem(PLACEMENT, 4, COSTS, Limits((8_000_000,) * 2)), seconds=0)


def required(called: Callable[..., Any]) -> list[str]:
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [name for name, each in signature(called).parameters.items() if each.default is each.empty and each.kind not in kinds]


@pytest.mark.parametrize(("call", "stated"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_call_is_an_input_error_with_the_value_and_the_remedy(call: Call, stated: Stated) -> None:
    with raises(InputError, *stated) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "value", "stated"),
    [
        (function("output", "target"), len, ("(obj)",)),
        (function("output", "target"), Tensor, ("Tensor()",)),
        (function("output", makes="Schedule"), early_w, ("ranks", "microbatches", "stages_per_rank")),
        (either(Placement, function("microbatch")), "linear", ("Placement.linear",)),
        (optional(each(NUMBER)), [1, "2"], (2,)),
        (each(NUMBER), Tensor(1), ("value.tolist()",)),
        (each(zb.Timeline), (SCHEDULE,), ("simulate",)),
        (COUNT, "40GB", (40 * GB,)),
        (function("output"), 1, ()),
        (instance(str), early_w, ()),
    ],
)
def test_the_remedy_follows_from_what_is_wanted_and_what_came(wanted: Wanted, value: Any, stated: Stated) -> None:
    with raises(InputError, argument="given", expected=wanted.words) as caught:
        require("given", value, wanted)
    remedy = caught.value.fields["remedy"]
    if stated:
        states(remedy, *stated)
    else:
        assert not remedy


@pytest.mark.parametrize(
    ("call", "stated"),
    [
        (lambda: zb.plan(WORK, 4, 10**400, placements="linear", evaluations=0), "memory"),
        (lambda: zb.planning.Sharded(10, None, 10**400), "bytes_per_second"),
        (lambda: zb.planning.Sharded(10, 10**400), "memory"),
        (lambda: zb.planning.Sharded(10, -1), "memory"),
        (lambda: known_block("v-half", "2"), "ranks"),  # type: ignore[arg-type]
    ],
    ids=range(5),
)
def test_a_number_out_of_range_is_an_input_error(call: Call, stated: str) -> None:
    with raises(InputError, stated):
        call()


def test_all_faults_among_arguments_are_found() -> None:
    first, second = faults_among({"every": 0, "costs": COSTS, "name": 1}, {"every": COUNT, "costs": Costs, "name": str})
    states(first, "every", 0)
    states(second, "name", 1)


def public(is_kind: Callable[[Any], bool]) -> list[Any]:
    return [found for space in namespaces() for name in space.names if is_kind(found := getattr(space.module, name))]


MADE_BY_USERS = (
    *(zb.Pipeline, zb.PostValidation, zb.Auto, zb.hooks.Telemetry, zb.hooks.BubbleWork, zb.nn.DividedHead),
    *(Schedule, Placement, Costs, Limits, Workload, zb.Program, zb.Timeline, Problem, zb.planning.Head, zb.planning.Sharded, Recipe),
    *(Layer, HostLink, RankOffloads, Block, zb.blocks.Start, zb.kinds.Traits, zb.kinds.CheckpointedForward, zb.io.Report),
    *(
        zb.cost_model.GPU,
        zb.cost_model.Model,
        zb.cost_model.Division,
        zb.cost_model.Efficiency,
        zb.cost_model.Experts,
        zb.cost_model.Latent,
    ),
)


@pytest.mark.parametrize("called", [*public(isfunction), *MADE_BY_USERS], ids=lambda called: called.__qualname__)
def test_an_argument_that_is_not_there_is_an_input_error_with_the_usage(called: Callable[..., Any]) -> None:
    """Of every public function, and of every class of which programs make instances."""
    named = [each for each in signature(called).parameters.values() if each.kind is not each.VAR_KEYWORD]
    with raises(InputError, called.__name__, *(each.name for each in named)) as caught:
        called(*range(len(named) + 1), qqqq=7)
    if len(named) == len(signature(called).parameters):
        assert caught.value.fields["argument"].split(", ")[0] == "qqqq"
        assert caught.value.fields["got"] == 7


@pytest.mark.parametrize("called", [*filter(required, [*public(isfunction), *MADE_BY_USERS])], ids=lambda called: called.__qualname__)
def test_a_missing_argument_is_an_input_error(called: Callable[..., Any]) -> None:
    """All that are missing are named at once."""
    with raises(InputError, argument=", ".join(required(called))):
        called()


@pytest.mark.parametrize(
    ("call", "argument", "got", "expected"),
    [
        (lambda: zb.plan(WORK, 8, budget=3), "budget", 3, "seconds"),
        (lambda: zb.plan(WORK, 8, limits=40 * GB), "limits", 40 * GB, "memory"),
        (lambda: zb.plan(WORK, chunks=8), "chunks", 8, "num_microbatches"),
        (lambda: zb.plan(WORK, 8, secnods=3), "secnods", 3, "seconds"),
        (lambda: make("zb-v", ranks=4, microbatches=8), "ranks, microbatches", (4, 8), "num_ranks, num_microbatches"),
        (lambda: make("zb-v", pp=4), "pp, num_microbatches", 4, "num_ranks, num_microbatches"),
        (lambda: zb.Pipeline([], "zb-v", 8, criterion=len), "criterion", "a builtin_function_or_method", "loss_fn"),
        (lambda: Limits(memroy=(1,)), "memroy", (1,), "memory"),
        (lambda: zb.Pipeline([], "zb-v", 8, len, microbatches=4), "microbatches", 4, ""),
    ],
)
def test_an_unknown_name_is_answered_with_the_one_that_was_meant(call: Call, argument: str, got: Any, expected: str) -> None:
    with raises(InputError, argument=argument, expected=expected) as caught:
        call()
    assert caught.value.fields["got"] == got


@pytest.mark.parametrize(("name", "meant"), [("pipeline", "Pipeline"), ("Schedul", "Schedule"), ("compare", "dir(zerobubble)")])
def test_an_unknown_name_of_the_package_is_answered_with_a_near_one(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(zb, name)
    states(caught.value, name, meant)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("carrier-pigeon", ("shared-memory", "gloo", "nccl"), ""),
        ("llama9-1b", ("llama3-70b", "gpt3-175b"), ""),
        ("explain", ("plan", "diff"), ""),
        ("loped-3", ("looped-3", "wave-3"), "looped-3"),
        ("shwo", ("show", "split"), "show"),
        ("v", ("linear", "vee", "any"), "vee"),
        ("w", ("wave-3", "wave-4"), ""),
    ],
)
def test_only_near_words_are_offered(word: str, known: tuple[str, ...], meant: str) -> None:
    assert nearest(word, known) == meant


def test_an_error_inside_a_function_is_not_taken_for_a_wrong_call() -> None:
    """Neither its own `TypeError` nor that of a function that it calls wrongly."""

    def called(inner: Callable[..., Any]) -> Any:
        return inner(1)

    for wrong in (lambda: None, lambda value: value + ""):
        with pytest.raises(TypeError):
            takes()(called)(wrong)


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


def test_a_remedy_is_no_other_refused_value() -> None:
    assert COUNT.remedy(4.0) == "write 4"
    assert [COUNT.remedy(wrong) for wrong in (-4.0, 4.5, float("inf"), "-4")] == [""] * 4


@pytest.mark.parametrize("name", ["bubble", "period", "spans_by_name"])
def test_a_figure_that_a_timeline_lacks_names_the_one_that_exists(name: str) -> None:
    timeline = zb.simulate(SCHEDULE, COSTS)
    with pytest.raises(AttributeError) as caught:
        getattr(timeline, name)
    hints = {"bubble": ["bubble_makespan", "bubble_span"], "period": ["zb.simulation.period"]}.get(name, [])
    assert caught.value.name == name
    assert [hint for hint in ("bubble_makespan", "bubble_span", "zb.simulation.period") if hint in str(caught.value)] == hints
