"""Models made by a function: each rank holds only its own parameters, with the values of one device, and no memory for others.

Holds on any rank that keeps a part.
"""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.families import tiny_model
from tests.libraries import library
from tests.procs.ranks import Ranks
from tests.refusals import raises
from zerobubble.models.making.factory import ModelFactory
from zerobubble.models.making.runs import PIECE


class Parts(nn.Module):
    """Three layers, for functions that do more to them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.c(self.b(self.a(x)))
        return result


def one_parameter_twice() -> nn.Module:
    """Registered twice from a variable, and drawn into by way of it."""
    model = Parts()
    shared = nn.Parameter(torch.empty(4, 4))
    model.a.weight = shared
    model.c.weight = shared
    nn.init.normal_(shared)
    return model


def copied_weights() -> nn.Module:
    """One part begins as a copy of another; a buffer has numbers of a third."""
    model = Parts()
    model.b.load_state_dict(model.a.state_dict())
    model.register_buffer("first", model.c.weight.detach()[0].clone())
    return model


def normed_weights() -> nn.Module:
    model = Parts()
    torch.nn.utils.parametrizations.weight_norm(model.a)
    torch.nn.utils.parametrizations.orthogonal(model.b)
    return model


def decides_by_numbers() -> nn.Module:
    """Looks at a number, and reads others past torch."""
    model = Parts()
    if model.a.weight.sum() > 0:
        nn.init.normal_(model.b.weight)
    model.a.bias.data.fill_(float(model.c.weight.detach().numpy().max()))
    return model


def draws_in_all_ways() -> nn.Module:
    """Of every layout and type, in place and anew, long and short."""
    model = Parts()
    for number, size in enumerate((7, 1000, PIECE - 3, 2 * PIECE + 5)):
        model.register_parameter(f"new{number}", nn.Parameter(torch.randn(size) * 0.1))
        model.register_parameter(f"half{number}", nn.Parameter(torch.empty(size, dtype=torch.bfloat16).normal_()))
        model.register_parameter(f"like{number}", nn.Parameter(torch.rand_like(model.get_parameter(f"new{number}"))))
        model.register_parameter(f"cut{number}", nn.Parameter(torch.empty(size)))
        nn.init.trunc_normal_(model.get_parameter(f"cut{number}"), std=0.02)
    square = nn.Parameter(torch.empty(1024, 512))
    model.square = square
    square.data.t().normal_()
    model.on_its_device = nn.Parameter(torch.randn(5, device=square.device))
    model.sparse = nn.Parameter(torch.empty(64, 64))
    nn.init.sparse_(model.sparse, 0.5)
    model.orthogonal = nn.Parameter(torch.empty(600, 600))
    nn.init.orthogonal_(model.orthogonal)
    model.last = nn.Linear(4, 4)
    return model


def cast_and_moved() -> nn.Module:
    return draws_in_all_ways().double().to("cpu")


def blank_and_filled() -> nn.Module:
    """Made on the meta device, where one device draws nothing, and filled afterwards."""
    with torch.device("meta"):
        model = Parts()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


FUNCTIONS: list[Callable[[], nn.Module]] = [
    *(one_parameter_twice, copied_weights, normed_weights, decides_by_numbers, draws_in_all_ways, cast_and_moved, blank_and_filled),
]


def judge(make: Callable[[], nn.Module]) -> None:
    """Whichever parameters are kept, they have the numbers of one device, and no others have any."""
    torch.manual_seed(3)
    factory = ModelFactory(make)
    whole = make()
    names = dict(whole.named_parameters(remove_duplicate=False))
    assert dict(factory.model.named_parameters(remove_duplicate=False)).keys() == names.keys()
    assert all(parameter.is_meta for parameter in factory.model.parameters())
    groups = [[name] for name in list(names)[:: max(1, len(names) // 6)]] + [list(names)[1::2], list(names)]
    for keep in groups:
        made = factory.make(keep)
        found = dict(made.named_parameters(remove_duplicate=False))
        kept = {id(names[name]) for name in keep}
        for name, parameter in names.items():
            assert found[name].is_meta == (id(parameter) not in kept)
            assert found[name].is_meta or torch.equal(found[name], parameter)
            assert (found[name].dtype, found[name].shape) == (parameter.dtype, parameter.shape)
        for name, buffer in whole.named_buffers():
            assert torch.equal(made.get_buffer(name), buffer)


@pytest.mark.sweep
@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_what_a_function_makes_has_the_numbers_of_one_device(make: Callable[[], nn.Module]) -> None:
    judge(make)


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_one_parameter_of_two_names_is_tied() -> None:
    split = zb.split(one_parameter_twice, example=torch.ones(1, 4))
    assert split.tied(3) == [[(0, "a.weight"), (2, "c.weight")]]


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_what_cannot_be_made_is_refused() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Parts()

    def permuted() -> nn.Module:
        model = Parts()
        model.a.weight.data = torch.poisson(model.a.weight.data.abs())
        return model

    for make, stated in ((on_meta, ("a.weight", "parameter")), (permuted, ("aten.poisson", "random"))):
        with raises(zb.InputError, *stated):
            ModelFactory(make).make(["a.weight", "a.bias"] if make is on_meta else ["b.weight"])


class Uninitialized(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.LazyLinear(4), nn.LazyBatchNorm1d())


class OnMeta(nn.Sequential):
    """Has a buffer outside of its parts, on the meta device."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("shift", torch.empty(4, device="meta"))


def parts_on_meta() -> nn.Module:
    with torch.device("meta"):
        return OnMeta()


@pytest.mark.parametrize("make", [Uninitialized(), Uninitialized])
def test_a_lazy_module_is_refused_by_name(make: Any) -> None:
    with raises(zb.InputError, name="1.weight", model="Uninitialized"):
        zb.split(make, example=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("make", "missing"), [(OnMeta(), "shift"), (OnMeta, "shift"), (parts_on_meta(), "0.weight"), (parts_on_meta, "0.weight")]
)
def test_a_model_on_the_meta_device_is_refused_by_the_name_of_a_tensor(make: Any, missing: str) -> None:
    """The example is not blamed."""
    with raises(zb.InputError, "meta", missing=missing):
        zb.split(make, example=torch.ones(2, 4))


def test_a_lazy_module_that_has_run_is_cut() -> None:
    model, x = Uninitialized(), torch.randn(3, 4)
    model(x)
    assert zb.split(model, example=x).describe(2).splitlines()[-1].startswith("Proved")


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_a_configuration_is_the_model_that_transformers_makes_of_it() -> None:
    transformers = library("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=99)
    torch.manual_seed(0)
    split = zb.split(config)
    whole = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    held = {name: parameter for stage in range(2) for name, parameter in split(stage, 2).named_parameters()}
    assert held.keys() == whole.keys()
    assert all(torch.equal(parameter, whole[name]) for name, parameter in held.items())


def test_an_error_of_the_function_is_its_own() -> None:
    def fails() -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        zb.split(fails)


@pytest.mark.long
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_weights_of_a_file_are_read_by_whom_they_belong_to(tmp_path: Path) -> None:
    """Of Transformers, with the experts that it puts together, in another type; of safetensors; of torch."""
    transformers = library("transformers")
    model: Any = tiny_model("mixtral")
    model.save_pretrained(tmp_path / "mixtral")
    torch.save(Parts().state_dict(), tmp_path / "parts.pt")
    library("safetensors.torch").save_file(Parts().state_dict(), tmp_path / "parts.safetensors")

    def of_transformers() -> nn.Module:
        made: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral", dtype=torch.float32)
        return made

    def of_safetensors() -> nn.Module:
        made = Parts()
        made.load_state_dict(library("safetensors.torch").load_file(tmp_path / "parts.safetensors"))
        return made

    def of_torch() -> nn.Module:
        with torch.device("meta"):
            made = Parts()
        made.load_state_dict(torch.load(tmp_path / "parts.pt", mmap=True), assign=True)
        return made

    for make in (of_transformers, of_safetensors, of_torch):
        judge(make)


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_modules_imported_while_a_model_is_made_read_files_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import `safe_open` where a reader stands in for it, which knows nothing of the next model that is made."""
    (tmp_path / "imported_late.py").write_text("from safetensors import safe_open\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    safe_open = library("safetensors").safe_open

    def make() -> nn.Module:
        importlib.import_module("imported_late")
        return Parts()

    ModelFactory(make)
    assert importlib.import_module("imported_late").safe_open is safe_open


def in_mebibytes(key: str) -> float:
    """What the system says of this process under `key`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


class Rows(nn.Embedding):
    """An embedding, with a table whose numbers are computed."""

    def __init__(self, width: int) -> None:
        super().__init__(4 * width, width)
        self.table = nn.Parameter(torch.randn(4 * width, width) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + nn.functional.embedding(ids, self.table)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.trunc_normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(x).relu())
        return result


class Stack(nn.Module):
    """An embedding, layers and a head, which is the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = Rows(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(50))
        self.head = nn.Linear(width, 4 * width)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def stack(width: int) -> tuple[Callable[[], nn.Module], Any]:
    return lambda: Stack(width), torch.zeros(2, 3, dtype=torch.long)


class Operations(nn.Module):
    """Matrices alone, and no parts: it is cut between operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + (x @ weight).tanh()
        return x


def operations(width: int) -> tuple[Callable[[], nn.Module], Any]:
    return lambda: Operations(width), torch.zeros(2, width)


def growth(group: Any, sizes: Callable[[Any], tuple[Callable[[], nn.Module], Any]], small: Any, large: Any) -> tuple[float, float]:
    """The MiB by which the peak of memory grows while a pipeline is made, and those of the rank's own parameters."""
    found = (0.0, 0.0)
    torch.manual_seed(0)
    for size in (small, large):  # the first has loaded and started what every pipeline needs
        make, example = sizes(size)
        gc.collect()
        before = in_mebibytes("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        with zb.Pipeline(zb.split(make, example=example), "zb-v", 4, nn.MSELoss(), group=group, timeout=100) as pipe:
            own = sum(parameter.nbytes for parameter in pipe.parameters()) / 2**20
            found = in_mebibytes("VmHWM:") - before, own
    return found


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is asked of Linux")
@pytest.mark.parametrize(("sizes", "large", "least"), [(stack, 512, 200), pytest.param(operations, 1024, 60, marks=pytest.mark.long)])
def test_no_rank_ever_holds_more_than_its_stages(world: Ranks, sizes: Any, large: int, least: int) -> None:
    """A model of 416 MiB on two ranks, four stages, and one of 128 MiB that is traced; `least` is what a rank holds of it in MiB."""
    for peak, own in world.run(growth, sizes, 8, large, ranks=2, seconds=550):
        assert own > least
        assert peak <= 1.1 * own


def test_warnings_of_the_function_are_shown_once_though_it_runs_often() -> None:
    def make() -> nn.Module:
        warnings.warn("from a library", FutureWarning, stacklevel=1)
        return Parts()

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        factory = ModelFactory(make)
        for name in ("a.weight", "b.weight"):
            factory.make([name])
    assert [str(warning.message) for warning in shown] == ["from a library"]
