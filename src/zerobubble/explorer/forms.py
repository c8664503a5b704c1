"""The forms in which the page saves an answer, and the commands and Python lines that reproduce it."""

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
class AnswerForm:
    """A form of the answer: the label of its button, the ending and media type of its file, and the function that writes it."""

    label: str
    ending: str
    media_type: str
    write: Callable[[Answer], str]


def _svg(memory: bool) -> Callable[[Answer], str]:
    def write(played: Answer) -> str:
        unit = None if played.in_bytes else played.microbatch_bytes
        shown = memory and bool(played.timeline.peak_bytes)
        return timeline_svg(played.timeline, memory=shown, microbatch_bytes=unit, captions=[played.viewed.caption])

    return write


def _comms(most_unsharded: int) -> Callable[[Answer], str]:
    def write(played: Answer) -> str:
        try:
            installed = version("torch")
        except PackageNotFoundError:
            remedy = "run zerobubble make --format torch-csv-comms --torch VERSION"
            raise InputError("this form depends on the version of PyTorch, and none is installed here: {remedy}", remedy=remedy) from None
        return to_torch_comms_csv(played.schedule, installed, most_unsharded)

    return write


def _times_csv(played: Answer) -> str:
    """Rank, pass, stage, microbatch, start and end in ms, a line a pass."""
    rows = [
        f"{rank},{span.op.kind},{span.op.stage},{span.op.microbatch},{span.start / 1e6},{span.end / 1e6}"
        for rank, span in played.timeline.spans()
    ]
    return "\n".join(["rank,kind,stage,microbatch,start_ms,end_ms", *rows]) + "\n"


def _plan(played: Answer) -> str:
    if played.plan is None:
        raise InputError("no plan is open, so there is none to save: {remedy}", remedy='find one under "Search", or open a plan file')
    return played.question.file


def _page(played: Answer) -> str:
    """The picture as a page of its own that opens offline."""
    figures = [show_ms(played.period), show_ms(played.timeline.makespan)]
    return comparison_html(played.schedule.name, ["period", "makespan"], [figures], [played.viewed], "")


FORMS: dict[str, AnswerForm] = {
    "svg": AnswerForm("SVG", "svg", "image/svg+xml", _svg(False)),
    "svg-memory": AnswerForm("SVG with memory", "memory.svg", "image/svg+xml", _svg(True)),
    "html": AnswerForm("page", "html", "text/html", _page),
    "json": AnswerForm("schedule, JSON", "schedule.json", "application/json", lambda played: dumps(played.schedule)),
    "text": AnswerForm("schedule, text", "txt", "text/plain", lambda played: played.schedule.to_text()),
    "plan": AnswerForm("plan, JSON", "plan.json", "application/json", _plan),
    "costs": AnswerForm("costs, JSON", "costs.json", "application/json", lambda played: dumps(played.costs)),
    "torch-csv": AnswerForm("PyTorch CSV", "csv", "text/csv", lambda played: to_torch_csv(played.schedule)),
    "torch-csv-comms": AnswerForm("PyTorch CSV with messages", "comms.csv", "text/csv", _comms(0)),
    "torch-csv-fsdp": AnswerForm("PyTorch CSV for FSDP", "fsdp.csv", "text/csv", _comms(MOST_UNSHARDED)),
    "times-csv": AnswerForm("times, CSV", "times.csv", "text/csv", _times_csv),
    "perfetto": AnswerForm("Perfetto", "perfetto.json", "application/json", lambda played: perfetto_json(played.timeline)),
    "program": AnswerForm("program", "program.txt", "text/plain", lambda played: lower(played.schedule).to_text()),
}
"""Every form by its name. PNG is drawn by the page itself."""


def write_form(played: Answer, name: str) -> str:
    """The answer in the form `name`; raises `FieldError` for an unknown form, `InputError` for an answer that the form cannot express."""
    if name not in FORMS:
        raise FieldError("", f"there is no form {name!r:.60}: known are {', '.join(FORMS)}")
    return FORMS[name].write(played)


def command(played: Answer) -> str:
    """The commands that find the schedule and show it, next to the compared one. They read the files of `needed_forms`.

    `zerobubble compare` reads one costs file. If each schedule needs its own, only the Python lines compare them.
    """
    question, other = played.question, played.below.other
    search = search_of(played)
    words = ["zerobubble", "show", *_source_words(played)]
    if other is not None and (played.costs == other.costs or not _needs_costs_file(played)):
        words = ["zerobubble", "compare", *_source_words(played)]
        words.insert(3, question.versus)
    if _needs_costs_file(played):
        words += ["--costs", quote(_costs_file(played))]
    elif played.plan is None:
        words += _times(question).options()
    return "\n".join([*([search.command()] if search else []), " ".join(words)])


def needed_forms(played: Answer) -> list[str]:
    """The labels of the forms to save first, because the command or the program reads their files."""
    search = search_of(played)
    plan = [FORMS["plan"].label] if played.plan is not None and not (search and search.writes_plan) else []
    return plan + ([FORMS["costs"].label] if _needs_costs_file(played) else [])


def _source_words(played: Answer) -> Iterator[str]:
    question = played.question
    if question.file:
        yield quote(_source_file(played))
        return
    yield from (question.schedule, "--ranks", str(question.ranks), "--microbatches", str(question.microbatches))
    if question.stages is not None:
        yield from ("--stages-per-rank", str(question.stages))
    for name, value in read_options(question.options).items():
        yield from ("--set", quote(f"{name}={value}"))


def _source_file(played: Answer) -> str:
    return played.question.file_name or ("plan.json" if played.plan is not None else "schedule.json")


def file_names(played: Answer) -> dict[str, str]:
    """The file name of each form. A plan keeps the name of its file, and the other names begin like it."""
    stem = played.schedule.name if played.plan is None else re.sub(r"(\.plan)?\.json$", "", _source_file(played))
    stem = re.sub(r"[^\w.-]+", "-", stem)
    names = {name: f"{stem}.{form.ending}" for name, form in FORMS.items()}
    return names | {"plan": _source_file(played), "png": f"{stem}.png"}


def _costs_file(played: Answer) -> str:
    return file_names(played)["costs"]


def _needs_costs_file(played: Answer) -> bool:
    """Whether the costs need a file, because stages or messages differ."""
    question = played.question
    return bool(question.costs or question.model) or (played.plan is None and question.slow_link is not None)


def python_lines(played: Answer) -> str:
    """The program that makes the same timeline, and that of the compared schedule. It reads the files of `needed_forms`."""
    lines = ["import zerobubble as zb", "", *_schedule_lines(played)]
    if played.plan is None or _needs_costs_file(played):
        lines.append(f"costs = {_costs_python(played)}")
    lines.append("timeline = zb.simulate(schedule, costs)")
    if (other := played.below.other) is not None:
        costs = _other_costs_python(played, other)
        lines += [f"other = {_make_python(other)}", f"other_timeline = zb.simulate(other, {costs})"]
    return "\n".join([*lines, "print(timeline)", *(["print(other_timeline)"] if other is not None else [])]) + "\n"


def _schedule_lines(played: Answer) -> Iterator[str]:
    if search := search_of(played):
        yield from search.python()
        yield "schedule, costs = plan.schedule, plan.problem.costs"
    elif played.plan is not None:
        yield f"plan = zb.io.load_plan({_source_file(played)!r})"
        yield "schedule, costs = plan.schedule, plan.problem.costs"
    elif played.question.file:
        yield f"schedule = zb.io.load_schedule({_source_file(played)!r})"
    else:
        yield f"schedule = {_make_python(played)}"


def _make_python(played: Answer) -> str:
    question = played.question
    stages = [] if question.stages is None else [f"stages_per_rank={question.stages}"]
    options = [f"{name}={value!r}" for name, value in read_options(question.options).items()]
    return f"zb.make({', '.join([repr(question.schedule), str(question.ranks), str(question.microbatches), *stages, *options])})"


def _other_costs_python(played: Answer, other: Answer) -> str:
    """The expression for the costs of the compared schedule: the same work of ranks, divided among its own stages."""
    if played.costs == other.costs:
        return "costs"
    if played.plan is not None and not _needs_costs_file(played):
        return "plan.problem.workload.costs(other.placement)"
    return _costs_python(other)


def _costs_python(played: Answer) -> str:
    question, schedule = played.question, played.schedule
    if played.estimate is not None:
        return estimate_python(question, schedule)
    if question.costs:
        return f"zb.io.load_costs({_costs_file(played)!r})"
    per_rank = max(1, schedule.num_stages // schedule.num_ranks)
    parts = [str(schedule.num_stages), *_times(question).arguments(), *([f"stages_per_rank={per_rank}"] if per_rank > 1 else [])]
    slowed = "" if question.slow_link is None else f".with_columns(comm={list(played.costs.comm)})"
    return f"zb.Costs.uniform({', '.join(parts)}){slowed}"


def _times(question: Question) -> RankTimes:
    return RankTimes(question.times, question.comm, question.held)


@dataclass(frozen=True)
class RankTimes:
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
class SearchedPlan:
    """A plan with the question and times of its search; `memory` is the limit in microbatches, None without one."""

    question: Question
    plan: Plan
    times: RankTimes
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


def search_of(played: Answer) -> SearchedPlan | None:
    """The search whose best plan is shown; None for other plans, for given costs or models, and if times differ between ranks."""
    question = played.question
    if question.search_seconds is None or played.plan is None or question.costs or question.model:
        return None
    work = played.plan.problem.workload
    if work is None or any(len(set(column)) > 1 for column in (work.forward, work.backward, work.weight, work.comm)):
        return None
    forward, backward, weight, comm = (column[0] / NS_PER_MS for column in (work.forward, work.backward, work.weight, work.comm))
    times = RankTimes((forward, backward, weight), comm, round(work.held_after_b[0] / work.held_after_f[0], 4))
    memory = played.plan.problem.limits.memory[0] / played.microbatch_bytes[0]
    return SearchedPlan(question, played.plan, times, None if memory >= played.plan.problem.num_microbatches else memory)


def _number(value: float) -> str:
    return f"{value:.12g}"
