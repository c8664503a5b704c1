"""Megatron's layout string: parsed as by Megatron, written in the shortest form, and preserved in a round trip."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import Stated, raises
from zerobubble.errors import InputError, ParseError
from zerobubble.export.megatron import balanced_layers, from_megatron_layout, to_megatron_layout
from zerobubble.ir import Placement

DEEPSEEK_V3 = "Et*3|(tt|)*29,m|L"


def unrolled(text: str) -> list[str]:
    """The stages as Megatron-LM finds them: commas dropped, then groups unrolled, then letters."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


@st.composite
def layers(draw: st.DrawFn) -> list[str]:
    """What the stages of a model hold, with stretches that repeat."""
    stretch = st.lists(st.integers(0, 4).map("t".__mul__), min_size=1, max_size=3)
    middle = draw(st.lists(st.tuples(stretch, st.integers(1, 12)), max_size=4))
    stages = ["E", *(stage for part, count in middle for _ in range(count) for stage in part), draw(st.sampled_from(["", "m", "mm"]))]
    stages[-1] += "L" * draw(st.booleans())
    return stages if stages[-1].endswith("L") else [*stages, "L"]


@given(layers())
def test_what_was_written_is_read_back_by_us_and_by_megatron(stages: list[str]) -> None:
    text = to_megatron_layout(stages)
    assert unrolled(text) == stages
    assert from_megatron_layout(text, len(stages))[1] == tuple(stages)
    assert len(text) <= len("|".join(stages))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 200))
def test_balanced_layers_are_even_and_come_back_with_their_placement(ranks: int, rounds: int, num_layers: int) -> None:
    placement = Placement.looped(ranks, rounds) if rounds > 1 else Placement.linear(ranks)
    stages = balanced_layers(placement, num_layers)
    counts = [stage.count("t") for stage in stages]
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1
    if counts[0] > min(counts):
        assert set(counts[:-1]) == {counts[0]}, "the embedding stage has a spare layer before every middle stage has one"
    assert counts[-1] == min(counts)
    assert from_megatron_layout(to_megatron_layout(stages), ranks) == (placement, stages)


def test_the_layout_of_megatrons_documentation() -> None:
    placement, stages = from_megatron_layout(DEEPSEEK_V3, 16)
    assert placement == Placement.looped(16, 2)
    assert [stages[0], stages[1], stages[29], stages[30], stages[31]] == ["Ettt", "tt", "tt", "m", "L"]
    assert "".join(stages).count("t") == 61
    assert to_megatron_layout(stages) == DEEPSEEK_V3


def test_losses_that_are_shared_out_over_stages() -> None:
    text = "E|(t|)*10m|m|m|LL|LL"
    placement, stages = from_megatron_layout(text, 8)
    assert placement == Placement.looped(8, 2)
    assert stages == ("E", *10 * ["t"], "m", "m", "m", "LL", "LL")
    written = to_megatron_layout(stages)
    assert written == "E|(t|)*10,m|m|m|LL|LL"
    assert tuple(unrolled(written)) == stages
    assert from_megatron_layout(written, 8) == (placement, stages)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("E|t|m|m|LL|LL", ("one L", "more", "m")),
        ("E|t|L|L", ("one L", "more", "m")),
        ("E|t|mL|mL", ("every L", "after")),
        ("E|t|m|LL", ("one L", "last")),
        ("E|t|m|m|L", ("every m", "stage")),
    ],
)
def test_losses_shared_out_wrongly_are_refused(text: str, why: Stated) -> None:
    with raises(InputError, "Megatron", *why):
        from_megatron_layout(text, 1 + text.count("|"))


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (["EttL"], "EttL"),
        (["Etttttt", "tttttL"], "Et*6|t*5,L"),
        (["Ett", "tt", "tt", "tt", "ttL"], "Ett|(tt|)*3,ttL"),
        (["E", "", "t", "L"], "E||t|L"),
        (["Et", "tt", "t", "tt", "t", "tt", "t", "tL"], "Et|(tt|t|)*3,tL"),
    ],
)
def test_the_shortest_string(stages: list[str], text: str) -> None:
    assert to_megatron_layout(stages) == text


def test_commas_say_nothing() -> None:
    assert from_megatron_layout("E,t,,*3|(t,t|),*2,L,", 2) == from_megatron_layout("Et*3|(tt|)*2L", 2)


@pytest.mark.parametrize(
    ("text", "ranks", "stated"),
    [
        ("Et|xL", 2, ("character 4", "x")),
        ("E,,t|,x,L", 2, ("character 7", "x")),
        ("E t|L", 2, ("character 2", "' '")),
        ("Et*|L", 2, ("character 3", "*")),
        ("Et*0|L", 2, ("character 3", "*")),
        ("Et*1000|L", 2, ("character 7", "0")),
        ("E|(t|x)*2,L", 2, ("character 6", "x")),
        ("E|(t|L", 2, ("end", "brackets")),
        ("E|(t|)L", 2, ("character 6", ")")),
        ("E|()*2L", 2, ("character 4", ")")),
        ("E|((t|)*2)*2L", 2, ("character 4", "(")),
        ("E|(t|)*2*2L", 2, ("character 9", "*")),
        ("Et|t|L", 2, (2, 3, "ranks", "share")),
        ("tE|L", 2, ("one E", "first")),
        ("E|EL", 2, ("one E",)),
        ("E|t", 2, ("one L", "last")),
        ("", 1, ("one E",)),
        ("Em|tL", 2, ("m", "every t")),
        ("Et|m|m|L", 2, ("every m", "stage")),
        ("Et|m||L", 2, ("m", "last", 2)),
        ("EL", 0, ("num_ranks", 0)),
    ],
)
def test_what_is_no_layout_is_refused(text: str, ranks: int, stated: Stated) -> None:
    with raises(InputError, *stated) as refusal:
        from_megatron_layout(text, ranks)
    assert isinstance(refusal.value, ParseError) == any(re.match("character|end", str(word)) for word in stated)


@given(st.text("Etm|L(),*0123", max_size=12))
def test_every_text_is_read_as_megatron_does_or_refused(text: str) -> None:
    try:
        stages = from_megatron_layout(text, 1)[1]
    except InputError:
        return
    assert list(stages) == unrolled(text)


@pytest.mark.parametrize("placement", [Placement.vee(2), Placement.wave(2, 2), Placement.bidirectional(2), Placement.custom((1, 0))])
def test_other_placements_cannot_be_expressed(placement: Placement) -> None:
    with raises(InputError, placement.name, "--placement linear,looped-2"):
        balanced_layers(placement, 8)


def test_unusable_layers_are_refused() -> None:
    with raises(InputError, "letter", "x"):
        to_megatron_layout(["Et", "xL"])
    with raises(InputError, "Megatron", "one E"):
        to_megatron_layout([])
    with raises(InputError, 1, 0, "layers"):
        balanced_layers(Placement.linear(2), 0)
