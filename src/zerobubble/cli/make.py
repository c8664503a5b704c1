"""`zerobubble make`: a schedule in any form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click

from zerobubble.cli.axes.head import vocabulary_option, with_head_divided
from zerobubble.cli.axes.offload import with_offloads_of_plan
from zerobubble.cli.inputs.options import (
    EQUAL_COSTS,
    CostOptions,
    SectionedCommand,
    Shape,
    cost_options,
    given_flags,
    option,
    option_group,
    shape_options,
)
from zerobubble.cli.inputs.schedule_and_costs import NamedSchedule, find_schedule, with_costs
from zerobubble.cli.outputs.evaluation import described
from zerobubble.errors import InputError
from zerobubble.export.document import dumps
from zerobubble.export.megatron import balanced_layers, to_megatron_layout
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.png import svg_to_png
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import MOST_UNSHARDED, to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.export.torchtitan import as_flags, torchtitan_settings
from zerobubble.ir import Schedule
from zerobubble.lowering import lower
from zerobubble.timeline import Timeline
from zerobubble.view import Report, report_html
from zerobubble.whole_files import require_suffix, write_bytes, write_text

LAYOUT = "megatron-layout"
TORCHTITAN = "torchtitan"
ORDERS: dict[str, Callable[[Schedule], str]] = {
    "text": Schedule.to_text,
    "json": dumps,
    "program": lambda schedule: lower(schedule).to_text(),
    "torch-csv": to_torch_csv,
}
"""Forms with the order of passes."""
WITH_MESSAGES = {"torch-csv-comms": 0, "torch-csv-fsdp": MOST_UNSHARDED}
"""Forms for PyTorch with messages, and the number of stages whose weights are gathered at a time."""
PICTURES: dict[str, Callable[[Timeline, str], str | bytes]] = {
    "svg": lambda timeline, title: timeline_svg(timeline, title=title),
    "png": lambda timeline, title: svg_to_png(timeline_svg(timeline, title=title)),
    "html": lambda timeline, _: report_html(Report(title=timeline.name, timelines=(timeline,))),
    "perfetto": lambda timeline, _: perfetto_json(timeline),
}
"""Forms with the times of passes, which need costs, of a timeline and a title."""
FORMATS = [*ORDERS, *WITH_MESSAGES, *PICTURES, LAYOUT, TORCHTITAN]
FORMS_OF: dict[str, tuple[str, ...]] = {
    ".txt": ("text", "program", LAYOUT),
    ".json": ("json", "perfetto"),
    ".csv": ("torch-csv", *WITH_MESSAGES, TORCHTITAN),
    ".svg": ("svg",),
    ".png": ("png",),
    ".html": ("html",),
    ".htm": ("html",),
}
"""The forms of files with a suffix; a file has the first one if none is asked for."""


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """The form to write, and what some forms need in addition to the schedule."""

    form: str | None = option(
        "--format", type=click.Choice(FORMATS), help="Form of the output. By default, by the name of the file, or text."
    )
    layers: int | None = option(
        "--layers", type=int, metavar="N", help="Transformer layers of the model, for megatron-layout and torchtitan."
    )
    torch: str | None = option(
        "--torch", metavar="VERSION", help="PyTorch version for a CSV with messages, such as 2.13; the installed one if not given."
    )
    as_json: bool = option("--json", is_flag=True, help="Same as --format json.")

    @property
    def name(self) -> str:
        """The form to write."""
        return "json" if self.as_json else self.form or "text"

    def of_file(self, output: str | None) -> FormOptions:
        """Returns these options with the form of the suffix of `output`, if no form was asked for. Raises for unknown suffixes."""
        if self.as_json or self.form or not (ending := Path(output or "").suffix.lower()):
            return self
        require_suffix(output or "", *FORMS_OF)
        return replace(self, form=FORMS_OF[ending][0])

    def check(self, output: str | None) -> None:
        """Raises if an option does not apply to the form, or if the suffix of `output` is that of another form."""
        if self.as_json and self.form not in (None, "json"):
            raise InputError(
                "{argument} and {other} contradict each other", argument="--json", other=f"--format {self.form}", remedy="give one"
            )
        if self.layers is not None:
            self._require_form("--layers", LAYOUT, TORCHTITAN)
        if self.torch is not None:
            self._require_form("--torch", *WITH_MESSAGES)
        if flags := given_flags("costs_file", *EQUAL_COSTS, "shares"):
            self._require_form(flags[0], *PICTURES)
        ending = Path(output or "").suffix.lower()
        if ending and self.name not in FORMS_OF.get(ending, ()):
            endings = [suffix for suffix, forms in FORMS_OF.items() if self.name in forms]
            right = Path(output or "").with_suffix(endings[0])
            raise InputError("--format {got} writes no {file_type} file", got=self.name, file_type=ending[1:], remedy=f"name it {right}")

    def _require_form(self, flag: str, *forms: str) -> None:
        if self.name not in forms:
            sentence = "{argument} applies to --format {expected}, not {got}"
            raise InputError(sentence, argument=flag, expected=" and ".join(forms), got=self.name, remedy="leave it out")


@click.command("make", cls=SectionedCommand)
@click.argument("name")
@shape_options
@vocabulary_option
@cost_options
@option_group(FormOptions, "form")
@click.option("-o", "--output", metavar="FILE", help="Write to this file instead of stdout.")
def make_file(name: str, shape: Shape, vocabulary: str | None, costing: CostOptions, form: FormOptions, output: str | None) -> None:
    """Write the schedule NAME as a file, in a form for this library, for others or for people.

    \b
    Examples:
      zerobubble make zb-h1 --ranks 4 --microbatches 8
      zerobubble make zb-v --ranks 4 --microbatches 8 -o zbv.png
      zerobubble make plan.json --format torch-csv -o plan.csv
      zerobubble make interleaved-1f1b --ranks 4 --microbatches 8 --format megatron-layout --layers 62

    \b
    Forms:
      text, json       the forms that all commands read
      program          the passes, messages and frees of each rank
      torch-csv        PyTorch's schedule CSV, format compute_only
      torch-csv-comms  the same with messages, format compute_comms
      torch-csv-fsdp   the same with messages, and weights gathered for FSDP
      svg, png, html   a picture; a page with the picture
      perfetto         a trace for ui.perfetto.dev
      megatron-layout  the value of --pipeline-model-parallel-layout
      torchtitan       PyTorch's CSV in the file of -o, and on stdout the settings of torchtitan

    The name of the file selects the form: .txt, .json, .csv, .svg, .png or .html. --format selects another one.

    NAME is a known schedule, or a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin. Pictures and traces use
    the costs given, else those of the plan with its copies to the host, else 1 ms for each of F, B and W of a rank. text, json and pictures
    support a head divided by --vocabulary.
    """
    form = form.of_file(output)
    form.check(output)
    named = with_head_divided(find_schedule(name, shape, costing), vocabulary)
    if form.name == TORCHTITAN:
        _for_torchtitan(named, form.layers, output)
        return
    text = _text(named, form, costing)
    if output is None:
        click.echo(text, nl=False)
    elif isinstance(text, bytes):
        write_bytes(output, text)
    else:
        write_text(output, text)


def _text(named: NamedSchedule, form: FormOptions, costing: CostOptions) -> str | bytes:
    """Returns the schedule in the form asked for."""
    if form.name in ORDERS:
        return ORDERS[form.name](named.schedule)
    if form.name in WITH_MESSAGES:
        return _with_messages(named, form.name, form.torch)
    if form.name == LAYOUT:
        return _layout(named, form.layers)
    (costed,) = with_costs([named], costing)
    return PICTURES[form.name](with_offloads_of_plan(costed, named).timeline, described(costed))


def _for_torchtitan(named: NamedSchedule, layers: int | None, output: str | None) -> None:
    """Writes the CSV to a file, and the settings that name it to stdout."""
    if output is None:
        raise InputError("{argument} needs {needed}, the CSV for torchtitan", argument=f"--format {TORCHTITAN}", needed="-o FILE")
    settings = as_flags(torchtitan_settings(named.schedule, output, layers))
    write_text(output, to_torch_csv(named.schedule))
    click.echo(settings, nl=False)


def _with_messages(named: NamedSchedule, form: str, torch: str | None) -> str:
    """Returns PyTorch's CSV with messages, for this version or the installed one."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and rarely needed

    try:
        return to_torch_comms_csv(named.schedule, torch or version("torch"), WITH_MESSAGES[form])
    except PackageNotFoundError:
        remedy = "give --torch VERSION, of the PyTorch that reads the file"
        raise InputError(
            "--format {form} depends on the version of PyTorch, and none is installed here: {remedy}", form=form, remedy=remedy
        ) from None


def _layout(named: NamedSchedule, layers: int | None) -> str:
    """Returns Megatron's layout, with `layers` transformer layers divided evenly. Raises for plans for layers, which have their own cut."""
    if named.problem is not None and (cut := named.problem.layers_per_stage):
        sizes = " ".join(map(str, cut))
        remedy = "spell each stage in E, t and L and write it with zerobubble.export.to_megatron_layout"
        raise InputError(
            "{name} has stages of {sizes} layers, and --format {form} divides layers evenly",
            name=named.name,
            sizes=sizes,
            form=LAYOUT,
            remedy=remedy,
        )
    if layers is None:
        raise InputError("{argument} needs {needed}, the number of transformer layers", argument=f"--format {LAYOUT}", needed="--layers N")
    return to_megatron_layout(balanced_layers(named.schedule.placement, layers)) + "\n"
