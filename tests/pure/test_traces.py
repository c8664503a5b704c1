"""Runs from PyTorch profiler traces: passes, clocks, costs and bubbles, and errors for unreadable traces.

The traces in `tests/pure/traces` were recorded with torch 2.13 on gloo; those of a GPU are made by hand in the form that Kineto
writes.

A trace gives the schedule that ran and its pass times, on consistent clocks, or an error that says what it lacks.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble.cli import main
from zerobubble.errors import InputError
from zerobubble.explain import WaitsFor
from zerobubble.timeline import Doing, Timeline
from zerobubble.traces import file
from zerobubble.whole_files import PIECE_BYTES

FOLDER = Path(__file__).parent / "traces"
KNOWN = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved-1f1b", "zbv": "zb-v", "dualpipev": "dualpipe-v"}
FORWARD, BACKWARD = 4e6, 6e6
"""ns that passes of the recorded runs sleep, stage 1 twice as long."""
SLACK = 8e6
"""ns that a pass or a message may take beyond: the machine that recorded them was busy."""


def files(run: str) -> list[str]:
    return [str(FOLDER / f"{run}-rank{rank}.json.gz") for rank in (0, 1)]


def document(run: str, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(gzip.decompress(Path(files(run)[rank]).read_bytes()))
    return loaded


def written(folder: Path, *documents: Any) -> list[str]:
    """Files with these documents, or texts, one a rank."""
    names = [folder / f"rank{rank}.json" for rank in range(len(documents))]
    for name, content in zip(names, documents, strict=True):
        name.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(map(str, names))


def changed(run: str, folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 1) -> list[str]:
    """The run with the trace of one rank changed."""
    documents = [document(run, 0), document(run, 1)]
    change(documents[rank])
    return written(folder, *documents)


def ops(timeline: Timeline) -> list[list[str]]:
    return [[str(span.op) for span in row] for row in timeline.rows]


# A run is its schedule, step by step.


@pytest.mark.parametrize("run", KNOWN)
def test_every_step_ran_the_schedule_in_its_order(run: str) -> None:
    traced = zb.io.read_trace(files(run))
    assert len(traced.timelines) == 3
    assert traced.labels == (1, 2, 3)
    wanted = zb.make(KNOWN[run], 2, 4)
    for step, timeline in enumerate(traced.timelines):
        assert (timeline.name, timeline.source) == (KNOWN[run], "measured")
        assert traced.schedule(step) == wanted
        assert zb.schedule_faults(traced.schedule(step)) == ()
        assert traced.difference(step, wanted).measured == timeline.makespan


@pytest.mark.parametrize("run", KNOWN)
def test_costs_are_what_passes_slept_without_the_wait_for_messages(run: str) -> None:
    costs = zb.io.read_trace(files(run)).costs()
    for stage in range(costs.num_stages):
        times = 2 if stage == 1 else 1
        assert times * FORWARD <= costs.forward[stage] <= times * FORWARD + SLACK
        backward, weight = costs.backward[stage], costs.weight[stage]
        if stage == 0 and weight:  # PyTorch's first stage has no input gradient to compute, and leaves all to W
            backward, weight = weight, backward
        assert times * BACKWARD <= backward <= times * BACKWARD + SLACK
        assert weight < SLACK
    assert max(costs.comm) < SLACK
    assert costs == zb.Costs.from_dict(json.loads(zb.io.dumps(costs)))


@pytest.mark.parametrize("run", KNOWN)
def test_all_idle_time_has_a_reason(run: str) -> None:
    traced = zb.io.read_trace(files(run))
    timeline = traced.timeline()
    for rank, row in enumerate(traced.gaps()):
        figures = timeline.ranks[rank]
        assert sum(gap.end - gap.start for gap in row) == figures.lead + figures.gaps
    assert any(gap.waits_for is WaitsFor.PASS for row in traced.gaps() for gap in row)
    assert {account.total for account in traced.difference().accounts} == {timeline.makespan}


def test_a_rank_waits_for_a_message_before_the_pass_that_uses_it() -> None:
    timeline = zb.io.read_trace(files("interleaved")).timeline()
    ended = {str(span.op): span.end for _, span in timeline.spans()}
    started = {str(span.op): span.start for _, span in timeline.spans()}
    waits = {mark.value: mark for mark in timeline.marks[1] if mark.doing is Doing.WAIT}
    assert ended["0F0"] <= waits["a0.0"].end <= started["1F0"]
    assert {"a0.0", "a2.0", "g2.0"} <= set(waits)
    assert {mark.value for mark in timeline.marks[1] if mark.doing is Doing.SEND} >= {"a1.0", "g3.0", "g1.0"}


def test_the_typical_step_is_of_median_makespan_among_those_that_are_alike(tmp_path: Path) -> None:
    def without_last_backward(trace: dict[str, Any]) -> None:
        steps = [event for event in trace["traceEvents"] if event["name"] == "ProfilerStep#3"]
        first = steps[0]["ts"]
        trace["traceEvents"] = [event for event in trace["traceEvents"] if not (event["name"] == "PP:1B3" and event["ts"] > first)]

    traced = zb.io.read_trace(changed("1f1b", tmp_path, without_last_backward))
    assert sorted(map(len, (timeline.rows[1] for timeline in traced.timelines))) == [7, 8, 8]
    assert traced.typical in (0, 1)
    assert traced.costs() == traced.costs(None)
    stated = ("rank1.json", "step 2", "1BW3")
    for use in (traced.difference, traced.gaps, traced.costs, traced.step_costs):
        with raises(InputError, *stated):
            use(2)
    with raises(InputError, "step 3", 0, 2):
        traced.timeline(3)


def test_steps_of_the_profiler_are_matched_by_their_numbers(tmp_path: Path) -> None:
    def without_step(number: int) -> Callable[[dict[str, Any]], object]:
        def change(trace: dict[str, Any]) -> None:
            (step,) = (event for event in trace["traceEvents"] if event["name"] == f"ProfilerStep#{number}")
            end = step["ts"] + step["dur"]
            trace["traceEvents"] = [event for event in trace["traceEvents"] if not step["ts"] <= event["ts"] < end]

        return change

    documents = [document("zbv", 0), document("zbv", 1)]
    without_step(1)(documents[0])
    without_step(3)(documents[1])
    traced = zb.io.read_trace(written(tmp_path, *documents))
    assert traced.labels == (2,)
    assert traced.timeline().makespan == zb.io.read_trace(files("zbv")).timeline(1).makespan
    for trace in documents:
        trace["traceEvents"] = [event for event in trace["traceEvents"] if not event["name"].startswith("ProfilerStep")]
    without_step_2 = json.loads(json.dumps(documents[1]))
    begin = sorted(event["ts"] for event in without_step_2["traceEvents"] if event["name"] == "PP:1F0")[1]
    without_step_2["traceEvents"] = [event for event in without_step_2["traceEvents"] if event["ts"] < begin]
    with raises(InputError, "rank0.json", 2, "rank1.json", 1):
        zb.io.read_trace(written(tmp_path, documents[0], without_step_2))


def test_files_come_in_any_order_and_form(tmp_path: Path) -> None:
    traced = zb.io.read_trace(files("zbv"))
    assert zb.io.read_trace(files("zbv")[::-1]).timelines == traced.timelines
    documents = [document("zbv", rank) for rank in (1, 0)]
    for trace in documents:
        del trace["distributedInfo"]
    assert zb.io.read_trace(written(tmp_path, *documents)).timelines == traced.timelines
    bare = [[event | {"ts": event["ts"]} for event in document("zbv", rank)["traceEvents"]] for rank in (0, 1)]
    assert zb.io.read_trace(written(tmp_path, *bare)).timelines == traced.timelines


# Clocks that are apart are moved by what messages allow.


@pytest.mark.parametrize("apart", [-3_600_000_000_000, -7_000_000, 5_000_000, 40_000_000])
def test_clocks_that_are_apart_are_found_within_their_bounds(tmp_path: Path, apart: int) -> None:
    def change(trace: dict[str, Any]) -> None:
        trace["baseTimeNanoseconds"] += apart
        trace["host_name"] = "b"

    wanted, found = zb.io.read_trace(files("interleaved")), zb.io.read_trace(changed("interleaved", tmp_path, change))
    true, moved = wanted.clocks[1], found.clocks[1]
    assert true.shift == 0
    assert true.least is not None
    assert true.most is not None
    assert (moved.least, moved.most) == (true.least - apart, true.most - apart)
    assert true.most - true.least < 2_000_000
    assert abs(moved.shift + apart) <= (true.most - true.least) / 2 + 1
    assert abs(found.timeline().makespan - wanted.timeline().makespan) < 2_000_000
    assert ops(found.timeline()) == ops(wanted.timeline())


def test_clocks_that_contradict_nothing_stay(tmp_path: Path) -> None:
    def change(trace: dict[str, Any]) -> None:
        trace["baseTimeNanoseconds"] += 10_000

    assert [clock.shift for clock in zb.io.read_trace(changed("interleaved", tmp_path, change)).clocks] == [0, 0]


def test_traces_of_two_runs_are_refused(tmp_path: Path) -> None:
    documents = [document("1f1b", 0), document("1f1b", 1)]
    for trace in documents:  # either rank begins its second pass right after its first
        first = {event["name"]: event for event in reversed(trace["traceEvents"])}
        for name in ("PP:0B0", "PP:1F0"):
            if name in first:
                first[name]["ts"] -= 3_000
    documents[0]["traceEvents"] = [event for event in documents[0]["traceEvents"] if event["name"] != "gloo:recv"]
    with raises(InputError, "rank", "message", "clocks"):
        zb.io.read_trace(written(tmp_path, *documents))


# A GPU's passes are what ran on it.


def gpu_trace(rank: int, passes: list[tuple[str, float, float]], launches: list[tuple[float, float, float, str, int]]) -> dict[str, Any]:
    """A trace with the host's ranges (name, start, end) and kernels (launched, start, end, name, stream), in ms."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 9, "tid": 9, "ts": 1000 * start, "dur": 1000 * (end - start)}
        for name, start, end in passes
    ]
    for number, (launched, start, end, name, stream) in enumerate(launches):
        tid = 10 if "backward" in name else 9
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": tid, "ts": 1000 * launched, "dur": 5.0}
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": 1000 * start, "dur": 1000 * (end - start)}
        events += [each | {"args": {"correlation": number}} for each in (launch, kernel)]
    annotation = {"ph": "X", "cat": "gpu_user_annotation", "name": passes[0][0], "pid": 0, "tid": 7, "ts": 1.0, "dur": 1.0}
    return {
        "baseTimeNanoseconds": 10**18,
        "deviceProperties": [{"id": 0}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": [*events, annotation],
    }


def gpu_run(folder: Path) -> list[str]:
    """Two stages and one microbatch: the host runs ahead of the GPUs, and autograd launches from a thread of its own."""
    first = gpu_trace(
        0,
        [("PP:0F0", 0, 1), ("PP:0SEND_F0", 1, 1.1), ("PP:0RECV_B0", 1.1, 1.2), ("PP:0B0", 1.2, 2), ("PP:0REDUCE_GRAD", 2, 2.2)],
        [
            (0.1, 10, 12, "gemm", 7),
            (0.2, 12, 15, "gemm", 7),
            (0.3, 9, 16, "memcpy", 8),
            (1.05, 15, 16, "ncclDevKernel_SendRecv", 20),
            (1.15, 15, 31, "ncclDevKernel_SendRecv", 21),
            (1.5, 31, 35, "backward_gemm", 7),
            (1.6, 35, 39, "backward_gemm", 7),
            (2.1, 39, 43, "ncclDevKernel_ReduceScatter", 22),
        ],
    )
    second = gpu_trace(
        1,
        [("PP:1RECV_F0", 0, 0.1), ("PP:1F0", 0.1, 1), ("PP:1B0", 1, 2), ("PP:1SEND_B0", 2, 2.1)],
        [
            (0.05, 1, 16, "ncclDevKernel_SendRecv", 20),
            (0.2, 16, 20, "gemm", 7),
            (1.1, 20, 30, "backward_gemm", 7),
            (2.05, 30, 31, "ncclDevKernel_SendRecv", 21),
        ],
    )
    return written(folder, first, second)


def test_a_gpus_passes_last_from_their_first_to_their_last_kernel(tmp_path: Path) -> None:
    traced = zb.io.read_trace(gpu_run(tmp_path))
    timeline = traced.timeline()
    assert traced.clock == "kernels"
    assert [[(str(span.op), span.start, span.end) for span in row] for row in timeline.rows] == [
        [("0F0", 0, 5_000_000), ("0BW0", 21_000_000, 29_000_000)],
        [("1F0", 6_000_000, 10_000_000), ("1BW0", 10_000_000, 20_000_000)],
    ]
    assert [(str(mark.doing), mark.value, mark.end) for mark in timeline.marks[1]] == [
        ("wait", "a0.0", 6_000_000),
        ("send", "g1.0", 21_000_000),
    ]
    assert timeline.reductions == (((0, 29_000_000, 33_000_000),), ())
    assert traced.costs().reduce == (4_000_000, 0)
    assert traced.costs().comm == (1_000_000,)


def test_what_a_gpus_trace_lacks_is_reported(tmp_path: Path) -> None:
    hosted = zb.io.read_trace(changed("zbv", tmp_path, lambda trace: trace.update(deviceProperties=[{"id": 0}])))
    assert hosted.clock == "host"
    assert hosted.notes[0].endswith("comes from a machine with a GPU, but has no kernels: its times are those of the host")
    mixed = [json.loads(Path(name).read_text()) for name in gpu_run(tmp_path)]
    without = [event for event in mixed[1]["traceEvents"] if event["cat"] == "user_annotation"]
    with raises(InputError, "traces", "kernels"):
        zb.io.read_trace(written(tmp_path, mixed[0], mixed[1] | {"traceEvents": without}))
    for event in mixed[0]["traceEvents"]:
        event.pop("args", None)
    with raises(InputError, "rank0.json", 0, "ProfilerActivity.CPU"):
        zb.io.read_trace(written(tmp_path, mixed[0], mixed[1]))


# What cannot be read says where and why.


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ('{"traceEvents": [\n{"ph": "X", "name"', ("rank0.json", "line 2")),
        ('{"traceEvents": [\n{"ph": "X",, "name": 1}]}', ("rank0.json", "line 2", "JSON", "column 12")),
        ("{}", ("traceEvents", "trace")),
        ("7", ("trace", "profiler")),
        ('{"traceEvents": [3]}', ("event 0", "object")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": "now", "dur": 1}]}', ("event 0", "PP:0F0", "ts", "now")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": 1}]}', ("event 0", "PP:0F0", "dur", "None")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": NaN, "dur": 1}]}', ("event 0", "ts", "nan")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": 1, "dur": -2}]}', ("PP:0F0", -2)),
        ('{"baseTimeNanoseconds": "x", "traceEvents": []}', ("baseTimeNanoseconds", "x")),
        ('{"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 1}]}', (1, "pipeline", "events")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0UNSHARD", "ts": 1, "dur": 1}]}', ("messages", "weights")),
        ('{"baseTimeNanoseconds": 1' + "0" * 40 + ', "traceEvents": []}', ("baseTimeNanoseconds", "64 bits")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:999999999F0", "ts": 1, "dur": 1}]}', (999999999, 1000000000, "stages")),
        ('{"traceEvents": [{"ph": "X", "name": "PP:0F999999999", "ts": 1, "dur": 1}]}', ("step 0", "microbatch 0")),
        ("[" * 100_000, ("rank0.json",)),
    ],
)
def test_a_broken_trace_says_where(tmp_path: Path, text: str, stated: Stated) -> None:
    with raises(InputError, *stated):
        zb.io.read_trace(written(tmp_path, text))


def test_a_broken_file_says_why(tmp_path: Path) -> None:
    packed = Path(files("zbv")[0]).read_bytes()
    for name, data, stated in (
        ("cut.json.gz", packed[:-40], ("cut.json.gz", "gzip")),
        ("bad.json.gz", packed[:60] + b"xxxx" + packed[64:], ("bad.json.gz",)),
        ("latin.json", b'{"traceEvents": "\xe9"}', ("latin.json", "UTF-8")),
    ):
        (tmp_path / name).write_bytes(data)
        with raises(InputError, *stated):
            zb.io.read_trace([tmp_path / name])
    with raises(InputError, str(tmp_path / "none.json"), foreign=os.strerror(errno.ENOENT)):
        zb.io.read_trace([tmp_path / "none.json"])
    with raises(InputError, "read_trace"):
        zb.io.read_trace([])
    with raises(InputError, "files", "tuple"):
        zb.io.read_trace("rank0.json")


@pytest.mark.long
def test_a_trace_is_read_in_pieces_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "MOST_BYTES", 10 * PIECE_BYTES)
    monkeypatch.setattr(file, "MOST_OBJECTS", PIECE_BYTES)
    (tmp_path / "short.json").write_text("[]")
    (tmp_path / "long.json").write_bytes(b" " * (10 * PIECE_BYTES + 1))
    (tmp_path / "many.json").write_bytes(b"[" + b"{}," * PIECE_BYTES + b"{}]")
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * (1000 * PIECE_BYTES), 1))
    for name, stated in (
        ("short", ("pipeline", "range")),
        ("long", ("10,485,760", "bytes")),
        ("bomb", ("bytes", "unpacked")),
        ("many", ("1,048,576", "objects")),
    ):
        found = next(tmp_path.glob(f"{name}.*"))
        tracemalloc.start()
        with raises(InputError, *stated):
            zb.io.read_trace([found])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < (2 if name == "short" else 15) * PIECE_BYTES


def test_a_trace_without_named_passes_says_how_to_get_them() -> None:
    with raises(InputError, "PP:2F0", "zb.io.name_passes"):
        zb.io.read_trace(files("1f1b-unnamed"))


def test_ranks_that_are_missing_or_come_twice_are_reported(tmp_path: Path) -> None:
    for run in ("interleaved", "zbv"):
        for rank in (0, 1):
            with raises(InputError, missing=2, stages=4):
                zb.io.read_trace(files(run)[rank : rank + 1])
    with raises(InputError, stage=0, stages=2):
        zb.io.read_trace(files("1f1b")[1:])

    def last_of_three(trace: dict[str, Any]) -> None:
        trace["distributedInfo"].update(world_size=3, pg_count=1)

    with raises(InputError, ranks=3, got=2):
        zb.io.read_trace(changed("zbv", tmp_path, last_of_three))
    with raises(InputError, "zbv-rank0.json.gz", rank=0):
        zb.io.read_trace(files("zbv") + files("zbv")[:1])

    def of_replica(trace: dict[str, Any]) -> None:
        trace["distributedInfo"]["rank"] = 5

    replica = changed("zbv", tmp_path, of_replica)
    with raises(InputError, stage=1):
        zb.io.read_trace([*files("zbv"), replica[1]])


def test_ranges_that_are_not_known_are_left_out_and_reported(tmp_path: Path) -> None:
    def change(trace: dict[str, Any]) -> None:
        event = next(event for event in trace["traceEvents"] if event["name"] == "PP:1F0")
        trace["traceEvents"].append(event | {"name": "PP:1DREAM0", "ts": event["ts"] + 1, "dur": 1})

    traced = zb.io.read_trace(changed("zbv", tmp_path, change))
    assert len(traced.notes) == 1
    assert traced.notes[0].endswith("rank1.json: 1 ranges that are no known action were left out: PP:1DREAM0")
    assert traced.recognition().exact


# On the command line.


def run_command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


def test_the_command_shows_explains_and_writes(tmp_path: Path) -> None:
    names = {word: str(tmp_path / f"{word}.json") for word in ("costs", "run")}
    page = tmp_path / "trace.html"
    code, output = run_command("trace", *files("zbv"), "--html", str(page), "--costs", names["costs"], "-o", names["run"], "--width", "120")
    assert code == 0, output
    for part in ("zb-v: 2 ranks, 4 stages, 4 microbatches, timed by ranges on the host", "3 steps of", "rank 1 ", "host overhead"):
        assert part in output
    text = page.read_text(encoding="utf-8")
    assert "measured" in text
    assert run_command("diff", "zb-v", names["run"], "--costs", names["costs"])[0] == 0
    costs = zb.io.load_costs(names["costs"])
    assert isinstance(costs, zb.Costs)
    assert costs.placement == zb.Placement.vee(2)


def test_the_command_speaks_json() -> None:
    code, output = run_command("trace", *files("interleaved"), "--json", "--step", "2", "--schedule", "interleaved-1f1b")
    found = json.loads(output)
    assert code == 0
    assert (found["step"], found["clock"], found["schedule"]["name"]) == (2, "host", "interleaved-1f1b")
    assert [step["profiler_step"] for step in found["steps"]] == [1, 2, 3]
    assert found["difference"]["measured"] / 1e6 == pytest.approx(found["steps"][2]["makespan_ms"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "zb-v"), "rank 0 of zb-v has 0F2 at place 2, the trace 2F0; of the schedule in the trace: it is interleaved-1f1b"),
        (("--schedule", "1f1b"), r"1f1b"),
        (("--step", "9"), "there is no step 9: the traces have steps 0 to 2"),
        (("--html", "/nowhere/x.html"), "cannot write /nowhere/x.html"),
    ],
)
def test_the_command_refuses_in_a_sentence(words: tuple[str, ...], message: str) -> None:
    code, output = run_command("trace", *files("interleaved"), *words)
    assert code == 2
    assert re.search(message, output)
    assert len(output.splitlines()) == 1


def test_a_trace_of_few_passes_of_many_stages_takes_memory_by_its_size(tmp_path: Path) -> None:
    """Tables of all stages and microbatches would take gigabytes."""
    documents = []
    for rank in range(2):
        names = [f"PP:{stage}F0" for stage in range(rank, 1000, 2)] + [f"PP:{rank}F{microbatch}" for microbatch in range(1, 1000)]
        documents.append(
            {"traceEvents": [{"ph": "X", "name": name, "cat": "cpu_op", "ts": 2 * at, "dur": 1} for at, name in enumerate(names)]}
        )
    paths = written(tmp_path, *documents)
    tracemalloc.start()
    try:
        run = zb.io.read_trace(paths)
        assert not run.recognition().name
        with raises(InputError, 1000, 2998, foreign=paths[0]):
            run.difference()
        assert tracemalloc.get_traced_memory()[1] < 40 * sum(os.path.getsize(path) for path in paths)
    finally:
        tracemalloc.stop()
