"""`predict` returns the outputs of one device, or what a function makes of each microbatch's, on the last rank or on all."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states

WORDS, WIDTH, PAD = 11, 6, -100


def decoder(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    first = [nn.Embedding(WORDS, WIDTH)] if stage == 0 else []
    last = [nn.Linear(WIDTH, WORDS)] if stage == num_stages - 1 else []
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), *last).double()


def sentences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, WORDS, (2, length), generator=generator) for length in lengths]


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0].sum(-1)


def predicted(group: Any, name: str) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Scores of sentences of several lengths on all ranks, those of one device, on the last rank, and the most logits alive at once."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def score(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal most
        assert not torch.is_grad_enabled()
        alive.add(logits)
        most = max(most, len(alive))
        return log_probs(logits, labels)

    parts = sentences(3, 9, 5, 4)
    with zb.Pipeline(decoder, name, 4, nn.functional.cross_entropy, group=group) as pipe:
        whole = nn.Sequential(*(decoder(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)))
        shared = pipe.predict(parts, parts, output_fn=score, to="all")
        last = pipe.predict(parts, parts, output_fn=score)
        assert pipe.losses is None
        return shared, torch.cat([log_probs(whole(part), part) for part in parts]).detach(), last, most


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v", "forward-only"])
def test_scores_of_microbatches_equal_one_device(world: Ranks, name: str) -> None:
    results = world.run(predicted, name, ranks=2)
    for shared, expected, _, most in results:
        torch.testing.assert_close(shared, expected, rtol=0, atol=1e-12)
        assert most <= 1
    held = [last for _, _, last, _ in results if last is not None]
    assert len(held) == 1
    assert torch.equal(held[0], results[0][0])


def forms(group: Any) -> list[Any]:
    inputs, targets = batch(8)

    def of(output: Tensor) -> Any:
        return {"rows": (output, output.sum()), "name": "hidden", "size": len(output)}

    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        whole = nn.Sequential(*(build(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)))(inputs)
        found = [pipe.predict(inputs, output_fn=of, to="all"), pipe.predict(inputs, to="all"), pipe.predict(inputs, num_microbatches=1)]
        loss, rows = pipe.eval_step(inputs, targets, output_fn=log_probs)
        return [*found, loss, rows, whole.detach(), loss_fn(whole, targets).detach()]


def test_outputs_of_any_form_reach_all_ranks(world: Ranks) -> None:
    for rank, (nested, plain, single, loss, rows, whole, expected) in enumerate(world.run(forms, ranks=2)):
        assert (nested["name"], nested["size"], len(nested["rows"][1])) == ("hidden", len(whole) // 4, 4)
        for tensor in (nested["rows"][0], plain):
            torch.testing.assert_close(tensor, whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(loss, expected)
        assert [single is None, rows is None] == [rank == 0] * 2
        if rank == 1:
            assert len(rows) == len(whole)
            torch.testing.assert_close(single, whole, rtol=0, atol=1e-12)


def divided(group: Any) -> Any:
    """The number of rows that `output_fn` sees of each output of a divided head's body, and whether the loss is that without it."""
    torch.manual_seed(0)
    inputs, targets = torch.rand(8, 4, WIDTH), torch.randint(0, WORDS, (8, 4))
    head = zb.nn.DividedHead(lambda first, end: nn.Linear(WIDTH, end - first, bias=False), WORDS)
    schedule = zb.schedules.with_vocabulary(zb.make("zb-h1", group.size(), 4))
    with zb.Pipeline(lambda *_: nn.Linear(WIDTH, WIDTH), schedule, 4, head, group=group) as pipe:
        plain, _ = pipe.eval_step(inputs, targets)
        loss, sizes = pipe.eval_step(inputs, targets, output_fn=lambda output, target: (len(output), len(target)))
        return plain == loss, sizes, pipe.predict(inputs, output_fn=len)


def test_a_divided_head_keeps_outputs_until_its_loss_is_known(world: Ranks) -> None:
    assert world.run(divided, ranks=2) == [(True, None, None), (True, (2, 2), 2)]


def sliced(group: Any) -> Any:
    tokens = torch.arange(48).view(4, 12) % WORDS
    with zb.Pipeline(decoder, "1f1b", 2, nn.functional.cross_entropy, group=group, slices=3) as pipe:
        whole = nn.Sequential(*(decoder(s, 2) for s in range(2)))(tokens)
        picked = pipe.predict(tokens, tokens, output_fn=lambda logits, labels: logits.gather(-1, labels[..., None])[..., 0], to="all")
        return picked, whole.gather(-1, tokens[..., None])[..., 0].detach()


def test_slices_are_joined_along_the_sequence(world: Ranks) -> None:
    for picked, expected in world.run(sliced, ranks=2):
        torch.testing.assert_close(picked, expected, rtol=0, atol=1e-12)


def refused(group: Any) -> list[str]:
    said = []
    inputs, _ = batch(8)
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        for options in ({"to": "rank 0"}, {"to": "all", "output_fn": lambda output: SimpleNamespace(rows=output)}):
            with pytest.raises(zb.InputError) as caught:
                pipe.predict(inputs, **options)
            said.append(str(caught.value))
        assert pipe.predict(inputs, output_fn=len, to="all") == len(inputs) // 4
        return said


def test_wrong_receivers_and_objects_are_refused_on_all_ranks(world: Ranks) -> None:
    for receiver, kind in world.run(refused, ranks=2):
        states(receiver, "to", "'last'", "'all'", "rank 0")
        states(kind, "SimpleNamespace", 'to="all"')


def failing(group: Any) -> str:
    with pytest.raises(zb.PipelineError) as caught, zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.predict(batch(8)[0], output_fn=lambda output: output.logits)
    return str(caught.value)


def test_an_error_of_the_function_names_its_rank(world: Ranks) -> None:
    for said in world.run(failing, ranks=2):
        states(said, "rank 1", "output_fn", "logits")
