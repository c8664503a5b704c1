"""The programs of README and docs run as they are pasted."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import zerobubble as zb
from docs.api import parsed
from tests.procs.programs import ROOT, programs_of, run_forked
from tests.procs.versions import needs_torchs_runtime
from zerobubble.cli import main
from zerobubble.io import load_schedule
from zerobubble.schedules import SCHEDULES

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_program_runs_as_pasted(tmp_path: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run_forked(programs_of("README.md")[-1], tmp_path, 2))]
    assert len(losses) == 3
    shown, of_a_constant = map(float, re.findall(r"The loss falls to about ([\d.]+); a constant prediction has ([\d.]+)\.", README)[0])
    assert losses[-1] == pytest.approx(shown, rel=0.1)
    assert torch.sin(torch.randn(10**6)).var() == pytest.approx(of_a_constant, rel=0.01)


def test_the_program_of_a_pipelines_docstring_trains(tmp_path: Path) -> None:
    program = "\n".join(parsed(inspect.getdoc(zb.Pipeline) or "").example)
    assert len(run_forked(f"{program}\nassert loss.item() < 1\nprint('trained')", tmp_path, 2).split("trained")) == 3


@pytest.mark.long
def test_the_first_minutes_go_on_with_a_planned_schedule(tmp_path: Path) -> None:
    program, _ = programs_of("docs/quickstart.md")
    assert "evaluations=20_000" in program
    printed = run_forked(program.replace("20_000", "50"), tmp_path, 4)
    (first, before), (second, after) = re.findall(r"(.+): loss ([\d.]+)", printed)
    assert first == "1f1b" != second
    assert float(after) < float(before)


def test_the_page_on_own_schedules_trains_with_one(tmp_path: Path) -> None:
    printed = run_forked("".join(programs_of("docs/own-schedule.md")[:2]), tmp_path, 2)
    (name, loss), *others = re.findall(r"(\S+): loss ([\d.]+)", printed)
    assert (name, others) == ("early-w", [])
    assert float(loss) < 0.02


def test_the_gan_of_the_training_page_has_the_losses_of_one_device(tmp_path: Path) -> None:
    (program,) = programs_of("docs/training.md")
    assert "float" not in program
    double = program.replace("import zerobubble as zb\n", "import zerobubble as zb\ntorch.set_default_dtype(torch.float64)\n").replace(
        ".6f", ".12f"
    )
    shown = [tuple(map(float, pair)) for pair in re.findall(r"discriminator ([\d.]+), generator ([\d.]+)", run_forked(double, tmp_path, 2))]
    assert shown == [pytest.approx(pair, abs=1e-9) for pair in losses_of_a_gan(20)[4::5]]


def losses_of_a_gan(steps: int) -> list[tuple[float, float]]:
    """The losses of discriminator and generator in the usual loop on one device, in the order of the page's random numbers."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    parts = [
        nn.Sequential(nn.Linear(inputs, 32, **double), nn.Tanh(), nn.Linear(32, outputs, **double))
        for inputs, outputs in ((4, 8), (8, 2), (2, 8), (8, 1))
    ]
    generator, discriminator = nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])
    optimizers = [torch.optim.Adam(network.parameters(), lr=0.002) for network in (generator, discriminator)]
    true, false = torch.ones(64, 1, **double), torch.zeros(64, 1, **double)
    found = []
    for _ in range(steps):
        real, noise = torch.randn(64, 2, **double) + 2, torch.randn(64, 4, **double)
        judged = bce(discriminator(torch.cat([real, generator(noise).detach()])), torch.cat([true, false]))
        discriminator.zero_grad()
        judged.backward()
        optimizers[1].step()
        fooled = bce(discriminator(generator(noise)), true)
        generator.zero_grad()
        fooled.backward()
        optimizers[0].step()
        found.append((judged.item(), fooled.item()))
    return found


@pytest.mark.long
def test_the_page_on_hooks_keeps_replicas_equal(tmp_path: Path) -> None:
    program, _ = programs_of("docs/hooks.md")
    loss, difference = re.findall(r"loss ([\d.]+), replicas differ by (\S+)", run_forked(program, tmp_path, 4))[0]
    assert float(loss) < 0.1
    assert float(difference) == 0


@pytest.mark.long
def test_the_page_on_hooks_works_in_bubbles(tmp_path: Path) -> None:
    _, program = programs_of("docs/hooks.md")
    made, offered, used = re.findall(r"(\d+) batches made in (\S+) s of bubbles, of which (\S+) s", run_forked(program, tmp_path, 2))[0]
    assert int(made) > 0
    assert float(offered) > 0
    assert float(used) > 0


@pytest.mark.long
def test_the_page_on_bringing_a_model_shows_what_it_prints(tmp_path: Path) -> None:
    """Its programs go on from each other."""
    printed = run_forked("\n".join(programs_of("docs/any-model.md")), tmp_path, 2)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    (cut,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs/any-model.md").read_text(encoding="utf-8"), re.DOTALL)
    assert cut in printed
    assert "the likeliest next tokens" in printed


@pytest.mark.long
def test_the_quickstart_compares_a_model_with_one_device(tmp_path: Path) -> None:
    _, program = programs_of("docs/quickstart.md")
    (largest,) = re.findall(r"one device: (\S+)", run_forked(program, tmp_path, 2))
    assert float(largest) < 1e-15


@pytest.mark.long
def test_the_front_page_trains_an_unsplit_model(tmp_path: Path) -> None:
    (program,) = programs_of("docs/index.md")
    assert float(re.findall(r"loss ([\d.]+)", run_forked(program, tmp_path, 2))[0]) < 0.1


@pytest.mark.long
def test_the_page_on_hugging_face_plans_trains_resumes_and_generates(tmp_path: Path) -> None:
    (program,) = programs_of("docs/hugging-face.md")
    printed = run_forked(program, tmp_path, 2)
    (plan,) = re.findall(r"<Plan .*>", printed)
    assert "vee" in plan
    first, resumed = re.findall(r"step (\d+): loss ([\d.]+)", printed)
    assert (first[0], resumed[0]) == ("10", "20")
    assert float(resumed[1]) < float(first[1]) < 2
    assert "7 8 9 10 continues with 11 12 13 14" in printed
    assert (tmp_path / "adapter/adapter_config.json").is_file()


@pytest.mark.long
def test_the_page_on_memory_forecasts_what_is_measured(tmp_path: Path) -> None:
    (program,) = programs_of("docs/memory.md")
    rows = re.findall(r"rank \d: ([\d.]+) kB of activations, .*; measured ([\d.]+) kB", run_forked(program, tmp_path, 2))
    assert len(rows) == 2
    for forecast, measured in rows:
        assert float(measured) == pytest.approx(float(forecast), rel=0.02)


@pytest.mark.long
def test_the_page_on_auto_ends_with_a_plan(tmp_path: Path) -> None:
    (program,) = programs_of("docs/auto.md")
    printed = run_forked(program, tmp_path, 2)
    names = re.findall(r"step \d+: (.+)", printed)
    assert names[0] == "one by one"
    assert len(names) > 1
    assert re.search(r"bubble [\d.]+ %, at least [\d.]+ %", printed)


def test_the_page_on_kinds_recomputes(tmp_path: Path) -> None:
    (program,) = programs_of("docs/kinds.md")
    printed = run_forked(program, tmp_path, 2)
    assert printed.startswith("C0 C1 A0 ")
    assert "bytes held: 1100000 1000000" in printed
    assert re.search(r"loss [\d.]+", printed)


@pytest.mark.long
def test_the_page_on_meshes_keeps_replicas_equal(tmp_path: Path) -> None:
    program = programs_of("docs/mesh.md")[0]
    loss, difference = re.findall(r"loss ([\d.]+), replicas differ by (\S+)", run_forked(program, tmp_path, 4))[0]
    assert float(loss) < 0.1
    assert float(difference) == 0


@pytest.mark.long
def test_the_page_on_meshes_spreads_experts(tmp_path: Path) -> None:
    program = programs_of("docs/mesh.md")[1]
    first, last = (float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run_forked(program, tmp_path, 4)))
    assert last < first


def test_the_page_on_long_sequences_has_the_loss_of_whole_sequences(tmp_path: Path) -> None:
    whole, sliced = map(float, re.findall(r"loss ([\d.]+)", run_forked(programs_of("docs/long-sequences.md")[0], tmp_path, 2)))
    assert abs(whole - sliced) < 2e-4


@pytest.mark.long
def test_the_page_on_long_sequences_equals_one_device(tmp_path: Path) -> None:
    """Two ranks share each sequence; their loss is the mean over all tokens, and gradients are summed over them."""
    _, program = programs_of("docs/long-sequences.md")
    divided, alone, difference = re.findall(r"[\d.]+(?:e-\d+)?", run_forked(program, tmp_path, 4))
    assert divided == alone
    assert float(difference) < 1e-6


@pytest.mark.long
def test_the_page_on_checkpoints_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    program = programs_of("docs/checkpoints.md")[0]
    uninterrupted, resumed, alone = re.findall(r"(\d\.\d+)", run_forked(program, tmp_path, 2))
    assert uninterrupted == resumed == alone
    assert load_schedule(tmp_path / "checkpoint" / "schedule.json").name == "zb-v"


@pytest.mark.long
def test_the_page_on_checkpoints_gives_transformers_the_same_logits(tmp_path: Path) -> None:
    program = programs_of("docs/checkpoints.md")[1]
    assert run_forked(program, tmp_path, 1) == "the same logits: True\n"


@needs_torchs_runtime
def test_the_page_on_other_libraries_has_the_same_numbers_before_and_after(tmp_path: Path) -> None:
    (program,) = programs_of("docs/coming-from.md")
    printed = run_forked(program, tmp_path, 2)
    before, after = re.findall(r"(?:before|after): loss (\S+)", printed)
    assert before == after
    assert float(re.findall(r"gradients differ by (\S+)", printed)[0]) < 1e-6


def test_the_page_on_other_libraries_names_what_there_is() -> None:
    """Schedules, and options of the command line that it writes in backquotes."""
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    named = re.findall(r'`"([\w-]+)"`', page)
    assert len(named) > 6
    unknown = {name for name in named if not name.startswith("gradient_")} - set(SCHEDULES)
    assert not unknown
    for words in re.findall(r"`zerobubble (make [\w-]+ --ranks [^`]*)`", page):
        assert CliRunner().invoke(main, words.split()).exit_code == 0, words
