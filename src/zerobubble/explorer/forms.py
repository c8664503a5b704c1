"""The answer in every form that the page offers to save, and the lines that make it anew."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from zerobubble.errors import InputError
from zerobubble.explorer.answer import Answer
from zerobubble.explorer.estimating import estimate_lines
from zerobubble.explorer.question import FieldError, read_options
from zerobubble.export.json_form import dumps
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import MOST_UNSHARDED, to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.lowering import lower
from zerobubble.simulation import period
from zerobubble.units import show_ms
from zerobubble.view import comparison_html


@dataclass(frozen=True)
class Form:
    """A form of the answer: what the button says, the file's ending, its media type, and how it is written."""

    label: str
    ending: str
    media_type: str
    write: Callable[[Answer], str]


def _svg(made: Answer) -> str:
    unit = None if made.in_bytes else made.microbatch_bytes
    return timeline_svg(made.timeline, memory=bool(made.timeline.peak_bytes), microbatch_bytes=unit)


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


def _page(made: Answer) -> str:
    """The picture as a page of its own that opens offline."""
    figures = [show_ms(period(made.schedule, made.costs)), show_ms(made.timeline.makespan)]
    return comparison_html(made.schedule.name, ["period", "makespan"], [figures], [made.viewed], "")


FORMS: dict[str, Form] = {
    "svg": Form("SVG", "svg", "image/svg+xml", _svg),
    "html": Form("page", "html", "text/html", _page),
    "json": Form("schedule, JSON", "json", "application/json", lambda made: dumps(made.schedule)),
    "text": Form("schedule, text", "txt", "text/plain", lambda made: made.schedule.to_text()),
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
    """The command that shows the same schedule."""
    question = made.question
    words = ["zerobubble", "show", *_source_words(made)]
    if _needs_costs_file(made):
        words += ["--costs", _quoted(f"{made.schedule.name}.costs.json")]
    elif made.plan is None:
        words += ["--times", ",".join(map(_number, question.times))]
        words += ["--comm", _number(question.comm)] if question.comm else []
        words += ["--held", _number(question.held)] if question.held != 1 else []
    return " ".join(words)


def _source_words(made: Answer) -> Iterator[str]:
    question = made.question
    if question.file:
        yield _quoted(question.file_name or "schedule.json")
        return
    yield from (question.schedule, "--ranks", str(question.ranks), "--microbatches", str(question.microbatches))
    if question.stages is not None:
        yield from ("--stages-per-rank", str(question.stages))
    for name, value in read_options(question.options).items():
        yield from ("--set", _quoted(f"{name}={value}"))


def _needs_costs_file(made: Answer) -> bool:
    """Whether the times are more than three and one for messages."""
    question = made.question
    return bool(question.costs or question.model) or (made.plan is None and question.slow_link is not None)


def python_lines(made: Answer) -> str:
    """The program that makes the same timeline."""
    question = made.question
    lines = ["import zerobubble as zb", ""]
    if question.file and made.plan is not None:
        lines += [f"plan = zb.io.load_plan({question.file_name or 'plan.json'!r})", "schedule, costs = plan.schedule, plan.problem.costs"]
    elif question.file:
        lines.append(f"schedule = zb.io.load_schedule(open({question.file_name or 'schedule.json'!r}).read())")
    else:
        stages = [] if question.stages is None else [f"stages_per_rank={question.stages}"]
        own = [f"{name}={value!r}" for name, value in read_options(question.options).items()]
        shape = [repr(question.schedule), str(question.ranks), str(question.microbatches), *stages, *own]
        lines.append(f"schedule = zb.make({', '.join(shape)})")
    lines += list(_costs_lines(made))
    return "\n".join([*lines, "timeline = zb.simulate(schedule, costs)", "print(timeline)"]) + "\n"


def _costs_lines(made: Answer) -> Iterator[str]:
    question, schedule = made.question, made.schedule
    if made.estimate is not None:
        yield from estimate_lines(question, schedule)
    elif _needs_costs_file(made):
        yield f"costs = zb.io.loads(open({f'{schedule.name}.costs.json'!r}).read())  # saved as costs, JSON"
    elif made.plan is None:
        times = ", ".join(map(_number, question.times))
        parts = [str(schedule.num_stages), f"times=({times})", f"comm={_number(question.comm)}"]
        per_rank = max(1, schedule.num_stages // schedule.num_ranks)
        parts += [f"stages_per_rank={per_rank}"] if per_rank > 1 else []
        parts += [f"held={_number(question.held)}"] if question.held != 1 else []
        yield f"costs = zb.Costs.uniform({', '.join(parts)})"


def _number(value: float) -> str:
    return f"{value:.12g}"


def _quoted(word: str) -> str:
    """The word as a shell takes it."""
    return shlex.quote(word)
