"""The answer in every form that the page offers to save, and the lines that make it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from shlex import quote

from zerobubble.costs import NS_PER_MS
from zerobubble.errors import InputError
from zerobubble.explorer.answer import Answer
from zerobubble.explorer.estimating import estimate_python
from zerobubble.explorer.question import FieldError, Question, read_options
from zerobubble.export.document import dumps
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import MOST_UNSHARDED, to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.lowering import lower
from zerobubble.planning import Objective
from zerobubble.planning.answer import Plan
from zerobubble.units import show_ms
from zerobubble.view import comparison_html


@dataclass(frozen=True)
class Form:
    """A form of the answer: what the button says, the file's ending, its media type, and how it is written."""

    label: str
    ending: str
    media_type: str
    write: Callable[[Answer], str]


def _svg(memory: bool) -> Callable[[Answer], str]:
    def write(made: Answer) -> str:
        unit = None if made.in_bytes else made.microbatch_bytes
        shown = memory and bool(made.timeline.peak_bytes)
        return timeline_svg(made.timeline, memory=shown, microbatch_bytes=unit, captions=[made.viewed.caption])

    return write


def _comms(most_unsharded: int) -> Callable[[Answer], str]:
    def write(made: Answer) -> str:
        try:
            installed = version("torch")
        except PackageNotFoundError:
            remedy = "run zerobubble make --format torch-csv-comms --torch VERSION"
            raise InputError("this form depends on the version of PyTorch, and none is installed here: {remedy}", remedy=remedy) from None
        return to_torch_comms_csv(made.schedule, installed, most_unsharded)

    return write


def _times_csv(made: Answer) -> str:
    """Rank, pass, stage, microbatch, start and end in ms, a line a pass."""
    rows = [
        f"{rank},{span.op.kind},{span.op.stage},{span.op.microbatch},{span.start / 1e6},{span.end / 1e6}"
        for rank, span in made.timeline.spans()
    ]
    return "\n".join(["rank,kind,stage,microbatch,start_ms,end_ms", *rows]) + "\n"


def _plan(made: Answer) -> str:
    if made.plan is None:
        raise InputError("no plan is open, so there is none to save: {remedy}", remedy='find one under "Search", or open a plan file')
    return made.question.file


def _page(made: Answer) -> str:
    """The picture as a page of its own that opens offline."""
    figures = [show_ms(made.period), show_ms(made.timeline.makespan)]
    return comparison_html(made.schedule.name, ["period", "makespan"], [figures], [made.viewed], "")


FORMS: dict[str, Form] = {
    "svg": Form("SVG", "svg", "image/svg+xml", _svg(False)),
    "svg-memory": Form("SVG with memory", "memory.svg", "image/svg+xml", _svg(True)),
    "html": Form("page", "html", "text/html", _page),
    "json": Form("schedule, JSON", "schedule.json", "application/json", lambda made: dumps(made.schedule)),
    "text": Form("schedule, text", "txt", "text/plain", lambda made: made.schedule.to_text()),
    "plan": Form("plan, JSON", "plan.json", "application/json", _plan),
    "costs": Form("costs, JSON", "costs.json", "application/json", lambda made: dumps(made.costs)),
    "torch-csv": Form("PyTorch CSV", "csv", "text/csv", lambda made: to_torch_csv(made.schedule)),
    "torch-csv-comms": Form("PyTorch CSV with messages", "comms.csv", "text/csv", _comms(0)),
    "torch-csv-fsdp": Form("PyTorch CSV for FSDP", "fsdp.csv", "text/csv", _comms(MOST_UNSHARDED)),
    "times-csv": Form("times, CSV", "times.csv", "text/csv", _times_csv),
    "perfetto": Form("Perfetto", "perfetto.json", "application/json", lambda made: perfetto_json(made.timeline)),
    "program": Form("program", "program.txt", "text/plain", lambda made: lower(made.schedule).to_text()),
}
"""Every form by its name. PNG is drawn by the page itself."""


def write_form(made: Answer, name: str) -> str:
    """The answer in the form `name`; raises `FieldError` for an unknown one, `InputError` for what a form cannot hold."""
    if name not in FORMS:
        raise FieldError("", f"there is no form {name!r:.60}: known are {', '.join(FORMS)}")
    return FORMS[name].write(made)


def command(made: Answer) -> str:
    """The commands that find and show the same schedule, with the one it is compared with; it reads the files of `needed_forms`.

    `zerobubble compare` reads one costs file, so a comparison for which each schedule needs its own has only its Python lines.
    """
    question, other = made.question, made.other
    found = search_of(made)
    words = ["zerobubble", "show", *_source_words(made)]
    if other is not None and (made.costs == other.costs or not _needs_costs_file(made)):
        words = ["zerobubble", "compare", *_source_words(made)]
        words.insert(3, question.versus)
    if _needs_costs_file(made):
        words += ["--costs", quote(_costs_file(made))]
    elif made.plan is None:
        words += _times(question).options()
    return "\n".join([*([found.command()] if found else []), " ".join(words)])


def needed_forms(made: Answer) -> list[str]:
    """The labels of the forms to save first, because the command or the program reads their files."""
    found = search_of(made)
    plan = [FORMS["plan"].label] if made.plan is not None and not (found and found.writes_plan) else []
    return plan + ([FORMS["costs"].label] if _needs_costs_file(made) else [])


def _source_words(made: Answer) -> Iterator[str]:
    question = made.question
    if question.file:
        yield quote(_source_file(made))
        return
    yield from (question.schedule, "--ranks", str(question.ranks), "--microbatches", str(question.microbatches))
    if question.stages is not None:
        yield from ("--stages-per-rank", str(question.stages))
    for name, value in read_options(question.options).items():
        yield from ("--set", quote(f"{name}={value}"))


def _source_file(made: Answer) -> str:
    return made.question.file_name or ("plan.json" if made.plan is not None else "schedule.json")


def file_names(made: Answer) -> dict[str, str]:
    """The name under which the page saves each form: a plan keeps that of its file, of which the others take the beginning."""
    stem = made.schedule.name if made.plan is None else re.sub(r"(\.plan)?\.json$", "", _source_file(made))
    stem = re.sub(r"[^\w.-]+", "-", stem)
    names = {name: f"{stem}.{form.ending}" for name, form in FORMS.items()}
    return names | {"plan": _source_file(made), "png": f"{stem}.png"}


def _costs_file(made: Answer) -> str:
    return file_names(made)["costs"]


def _needs_costs_file(made: Answer) -> bool:
    """Whether the times are more than three and one for messages."""
    question = made.question
    return bool(question.costs or question.model) or (made.plan is None and question.slow_link is not None)


def python_lines(made: Answer) -> str:
    """The program that makes the same timeline, and that of the schedule it is compared with; it reads the files of `needed_forms`."""
    lines = ["import zerobubble as zb", "", *_schedule_lines(made)]
    if made.plan is None or _needs_costs_file(made):
        lines.append(f"costs = {_costs_python(made)}")
    lines.append("timeline = zb.simulate(schedule, costs)")
    if (other := made.other) is not None:
        costs = _other_costs_python(made, other)
        lines += [f"other = {_make_python(other)}", f"other_timeline = zb.simulate(other, {costs})"]
    return "\n".join([*lines, "print(timeline)", *(["print(other_timeline)"] if other is not None else [])]) + "\n"


def _schedule_lines(made: Answer) -> Iterator[str]:
    if found := search_of(made):
        yield from found.python()
        yield "schedule, costs = plan.schedule, plan.problem.costs"
    elif made.plan is not None:
        yield f"plan = zb.io.load_plan({_source_file(made)!r})"
        yield "schedule, costs = plan.schedule, plan.problem.costs"
    elif made.question.file:
        yield f"schedule = zb.io.load_schedule(open({_source_file(made)!r}).read())"
    else:
        yield f"schedule = {_make_python(made)}"


def _make_python(made: Answer) -> str:
    question = made.question
    stages = [] if question.stages is None else [f"stages_per_rank={question.stages}"]
    own = [f"{name}={value!r}" for name, value in read_options(question.options).items()]
    return f"zb.make({', '.join([repr(question.schedule), str(question.ranks), str(question.microbatches), *stages, *own])})"


def _other_costs_python(made: Answer, other: Answer) -> str:
    """The costs of the compared schedule, of the same ranks in as many stages as it has."""
    if made.costs == other.costs:
        return "costs"
    if made.plan is not None and not _needs_costs_file(made):
        return "plan.problem.workload.costs(other.placement)"
    return _costs_python(other)


def _costs_python(made: Answer) -> str:
    question, schedule = made.question, made.schedule
    if made.estimate is not None:
        return estimate_python(question, schedule)
    if question.costs:
        return f"zb.io.loads(open({_costs_file(made)!r}).read())"
    per_rank = max(1, schedule.num_stages // schedule.num_ranks)
    parts = [str(schedule.num_stages), *_times(question).arguments(), *([f"stages_per_rank={per_rank}"] if per_rank > 1 else [])]
    slowed = "" if question.slow_link is None else f".with_columns(comm={list(made.costs.comm)})"
    return f"zb.Costs.uniform({', '.join(parts)}){slowed}"


def _times(question: Question) -> Times:
    return Times(question.times, question.comm, question.held)


@dataclass(frozen=True)
class Times:
    """Times of a rank and microbatch in ms, and the share of memory kept from B to W, to be written as options or arguments."""

    times: tuple[float, ...]
    comm: float
    held: float

    def options(self) -> list[str]:
        """The options of a command."""
        words = ["--times", ",".join(map(_number, self.times))]
        words += ["--comm", _number(self.comm)] if self.comm else []
        return words + (["--held", _number(self.held)] if self.held != 1 else [])

    def arguments(self) -> list[str]:
        """The keyword arguments of a call."""
        held = [f"held={_number(self.held)}"] if self.held != 1 else []
        return [f"times=({', '.join(map(_number, self.times))})", f"comm={_number(self.comm)}", *held]


@dataclass(frozen=True)
class Found:
    """The search that found a plan, with the question that asked for it; `memory` is the limit in microbatches, None without one."""

    question: Question
    plan: Plan
    times: Times
    memory: float | None

    @property
    def writes_plan(self) -> bool:
        """Whether the command writes the plan file."""
        return not self.question.search_limits

    @property
    def _seconds(self) -> str:
        return _number(self.question.search_seconds or 0)

    @property
    def _minimizes_makespan(self) -> bool:
        return self.plan.problem.objective is Objective.MAKESPAN

    def command(self) -> str:
        """The command of the search."""
        problem, limits = self.plan.problem, self.question.search_limits
        words = ["zerobubble", "pareto" if limits else "plan", "--ranks", str(problem.placement.num_ranks)]
        words += ["--microbatches", str(problem.num_microbatches), *self.times.options()]
        if limits:
            words += ["--memory", quote(limits)]
        elif self.memory is not None:
            words += ["--memory", f"{self.memory:.6g}"]
        words += ["--objective", str(problem.objective)] if self._minimizes_makespan else []
        return " ".join([*words, "--budget", self._seconds, *([] if limits else ["-o", "plan.json"])])

    def python(self) -> list[str]:
        """The Python lines that compute `plan`, for the memory limit of the plan shown even if the search had several limits."""
        problem = self.plan.problem
        work = [str(problem.placement.num_ranks), *self.times.arguments()]
        words = ["work", str(problem.num_microbatches), *([] if self.memory is None else [f"memory={self.memory:.6g}"])]
        words += [f"objective={str(problem.objective)!r}"] if self._minimizes_makespan else []
        return [f"work = zb.Workload.uniform({', '.join(work)})", f"plan = zb.plan({', '.join([*words, f'seconds={self._seconds}'])})"]


def search_of(made: Answer) -> Found | None:
    """The search whose best plan is shown; None for other plans, for given costs or models, and if times differ between ranks."""
    question = made.question
    if question.search_seconds is None or made.plan is None or question.costs or question.model:
        return None
    work = made.plan.problem.workload
    if work is None or any(len(set(column)) > 1 for column in (work.forward, work.backward, work.weight, work.comm)):
        return None
    forward, backward, weight, comm = (column[0] / NS_PER_MS for column in (work.forward, work.backward, work.weight, work.comm))
    times = Times((forward, backward, weight), comm, round(work.held_after_b[0] / work.held_after_f[0], 4))
    memory = made.plan.problem.limits.memory[0] / made.microbatch_bytes[0]
    return Found(question, made.plan, times, None if memory >= made.plan.problem.num_microbatches else memory)


def _number(value: float) -> str:
    return f"{value:.12g}"
