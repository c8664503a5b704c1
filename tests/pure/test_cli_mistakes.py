"""Mistakes on the command line: each ends in one sentence with the argument, the value and the remedy, and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.pure.test_cli import refused
from tests.refusals import Stated, states
from zerobubble.cli import main

P = "-p 4 -m 8"
TIMES = f"plan {P} --times 12,11,7"

MISTAKES: list[tuple[str, Stated]] = [
    # a command or a schedule
    ("help", ("'help'", "'--help'")),
    (f"shwo zb-h1 {P}", ("'shwo'", "'show'")),
    ("cluster", ("'cluster'", "plan")),
    (f"make zb-h9 {P}", ("'zb-h9'", "'zb-h1'")),
    (f"compare zb-h1 zbv {P}", ("'zbv'", "'zb-v'")),
    (f"compare 1f1b,zb-v {P}", ("'1f1b,zb-v'", "spaces")),
    ("table zb-h9", ("'zb-h9'", "'zb-h1'")),
    ("block zb-x -p 4", ("'zb-x'", "zb-h1")),
    # arguments that are missing, or too many
    ("make", ("NAME", "zb-h1", "--ranks")),
    ("make zb-h1", ("zb-h1", "--ranks", "--microbatches")),
    ("make zb-h1 -p 4", ("zb-h1", "--microbatches")),
    ("make zb-h1 -m 8", ("zb-h1", "--ranks")),
    ("check", ("NAME", "mine.csv")),
    ("check zb-h1", ("zb-h1", "--ranks", "--microbatches")),
    ("compare", ("NAMES...", "1f1b")),
    ("compare zb-h1", ("zb-h1", "--ranks", "--microbatches")),
    ("diff s.txt", ("RUN", "run.json")),
    ("plan", ("plan", "--ranks", "--microbatches")),
    (f"make zb-h1 {P} extra", ("extra",)),
    (f"show zb-h1 {P} --times", ("--times", "--help")),
    ("export-weights folder out", ("--config", "llama/config.json")),
    # options
    ("make zb-h1 --rank 4 -m 8", ("--rank", "--ranks")),
    (f"show zb-h1 {P} --rainbow", ("--rainbow", "--help")),
    (f"{TIMES} --placements ring", ("--placements", "--placement")),
    ("make interleaved-1f1b -p 2 -m 6 --set grup=3", ("'grup'", "'group'")),
    ("make interleaved-1f1b -p 2 -m 6 --set group", ("--set", "'group'", "group=8")),
    (f"show zb-h1 {P} --memory 2", ("--memory", "--offload")),
    # numbers, times and bytes
    ("make zb-h1 -p four -m 8", ("--ranks", "'four'")),
    ("make zb-h1 -p 0 -m 8", ("zb-h1", 0, 1)),
    ("make zb-h1 -p -2 -m 8", ("zb-h1", -2, 1)),
    ("make zb-h1 -p 4 -m 8.5", ("--microbatches", "'8.5'")),
    ("make dualpipe -p 3 -m 8", ("dualpipe", "even", 3)),
    (f"show zb-h1 {P} --times 1,2", ("--times", "'1,2'", "F,B,W")),
    (f"show zb-h1 {P} --times a,b,c", ("--times", "'a'", "ms")),
    (f"show zb-h1 {P} --times 1,-2,3", ("--times", -2, 0)),
    (f"show zb-h1 {P} --comm fast", ("--comm", "'fast'", "ms")),
    (f"show zb-h1 {P} --microbatch-costs 1,2", ("'zb-h1'", 8, 2)),
    (f"{TIMES} --memory lots", ("--memory", "'lots'", "40GB")),
    (f"{TIMES} --memory 40GB", ("--memory", "--microbatch-bytes")),
    (f"{TIMES} --memory 0", ("--memory", 0)),
    (f"{TIMES} --memory 0.1", (0.1, "memory", "recomputation")),
    (f"{TIMES} --budget -3", ("--budget", -3, 0)),
    (f"{TIMES} --objective speed", ("--objective", "'speed'", "'period'")),
    (f"pareto {P} --times 12,11,7 --memory 3", ("--memory", "'3'", "LO:HI:STEP")),
    ("explore --port 99999999", ("--port", 99999999, "65,535")),
    ("doctor --timeout never", ("--timeout", "'never'")),
    # models and GPUs
    ("plan --model llama9-1b --gpu H100 --gpus 8", ("'llama9-1b'", "llama3-70b", "config.json")),
    ("plan --model llama3-405b --gpu H1000 --gpus 8", ("'H1000'", "H100")),
    ("plan --model llama3-70b --gpus 8", ("llama3-70b", "--gpu")),
    ("plan --model llama3-70b --gpu H100", ("llama3-70b", "--gpus")),
    ("plan config.json --gpu RTX4090", ("config.json", "--gpus")),
    ("plan small.json --gpu RTX4090 --gpus 8", ("small.json", "num_hidden_layers", "config.json")),
    ("plan --from megatron:x --gpu H100", ("--from", "'megatron:x'", "titan:CONFIG")),
    ("plan config.json --gpu 4090 --gpus 8", ("'4090'", "'RTX4090'")),
    ("plan config.json --gpu A100_40GB --gpus 8", ("'A100_40GB'", "'A100-40GB'")),
    ("plan config.json --gpu h100 --gpus 8", ("'h100'", "'H100'")),
    ("plan config.json --gpu gpu.json --gpus 8", ("gpu.json", "doctor", "--measure")),
    ("plan config.json --gpu H100 --gpus 0", ("gpus", 0, 1)),
    ("plan config.json --gpu H100 --gpus 8 --sequence 4k", ("--sequence", "'4k'")),
    ("plan config.json --gpu H100 --gpus 8 --precision fp16", ("H100", "'fp16'", "'bf16'")),
    ("plan config.json --gpu H100 --gpus 8 --sequence 2k", ("--sequence", "'2k'", 2048)),
    ("plan config.json --gpu H100 --gpus 8 --memory 80", ("--memory", 80, "config.json", "70GB")),
    ("plan --model llama3-70b --gpu H100 --gpus 8 --memory 80", ("--memory", 80, "--model", "70GB")),
    ("plan config.json --gpu H100 --gpus 8 --pp 4", ("--pp", "pp", "CONFIG", "--pipeline-only", "--ranks")),
    ("plan config.json --gpu H100 --gpus 8 --tp 3", ("--tp", "tp", "CONFIG", "--pipeline-only")),
    ("plan config.json --gpu H100 --gpus 8 --memory 1GB", ("8 H100", "1 GB", "--memory")),
    ("plan config.json --gpu H100 --gpus 8 -p 4", ("config.json", "--ranks")),
    ("plan config.json --gpu H100 --gpus 8 -o out.json", ("--output", "split", "layers.json")),
    ("plan gpt2.json --gpu H100 --gpus 8 --sequence 2048", ("1,024", "2,048", "--sequence")),
    ("plan broken.json --gpu H100 --gpus 8", ("broken.json", "config.json")),
    (f"plan {P} --layers layers.json --gpu H100 --memory 2GB", ("--memory", "2 GB", "2.15 GB")),
    (f"plan {P} --layers layers.json --gpu H100 --gpus 8", ("--gpus", "--ranks")),
    (f"{TIMES} --gpu H100", ("--gpu", "--layers", "--from")),
    # files
    ("make missing.json", ("missing.json", "FOLDER")),
    ("make cost.json", ("cost.json", "'costs.json'")),
    ("make folder", ("folder", "file")),
    ("make notes.txt", ("notes.txt", "'hello'", "make", "--format")),
    ("make empty.json", ("empty.json", "empty", "make", "--format")),
    ("make broken.json", ("broken.json", "line", 1, "make", "--format")),
    ("check list.json", ("list.json", "make", "--format")),
    (f"show zb-h1 {P} --costs s.txt", ("s.txt", "schedule", "Pipeline.profile")),
    ("show zb-h1 -p 8 -m 8 --costs costs.json", ("'zb-h1'", 8, 4)),
    (f"plan {P} --layers list.json", ("list.json", "[F, B, W]")),
    (f"plan {P} --layers list.json --gpu H100", ("list.json", "bytes", "--gpu")),
    (f"plan {P} --layers broken.json", ("broken.json", "line", 1, "split")),
    (f"plan {P} --layers config.json", ("config.json", "split", "layers.json")),
    (f"plan {P} --layers layers.json --budget 0 --ranks 9", (2, 9, "2 ranks")),
    ("plan -m 8 --costs layers.json", ("layers.json", "--layers")),
    ("check layers.json", ("layers.json", "--layers")),
    ("make binary.json", ("binary.json", "UTF-8")),
    ("explore s.txt", ("s.txt", "--help")),
    ("doctor --measure speeds", ("'speeds'", "speeds.json")),
    (f"make zb-h1 {P} -o out.docx", ("docx", "out.txt")),
    ("plan missing.json --gpu RTX4090 --gpus 8", ("missing.json", "FOLDER")),
    ("plan missing.json --gpu RTX4090", ("missing.json", "FOLDER")),
    ("split gpt9", ("gpt9", "config.json")),
    ("split missing.json --stages 2", ("missing.json", "FOLDER")),
    ("show costs.json", ("costs.json", "--costs")),
    ("diff costs.json timeline.json", ("costs.json", "--costs")),
    ("diff timeline.json timeline.json", ("timeline.json", "diff", "zb-h1", "--costs")),
    ("compare zb-h1 zb-v -p 4 -m 8 --costs costs.json", ("'zb-v'", 8, 4, "pipe.profile", "--times")),
    ("trace list.json", ("list.json", "export_chrome_trace")),
    ("watch nowhere", ("nowhere", "zb.hooks.Telemetry")),
    ("watch folder", ("folder", "run.json", "zb.hooks.Telemetry")),
    ("watch runs", ("runs", "run.json", "runs/first")),
    (f"make zb-h1 {P} -o nowhere/out.txt", ("out.txt", "nowhere", "folder")),
    (f"make zb-h1 {P} -o folder", ("folder", "file")),
    (f"make zb-h1 {P} -o out.pdf", ("pdf", "out.png", "out.svg")),
    (f"make zb-h1 {P} -o out.jpeg", ("jpeg", "out.png", "out.svg")),
    (f"make zb-h1 {P} -o out.pngg", ("pngg", "out.png", ".csv")),
    (f"make zb-h1 {P} -o out.pngg --format text", ("text", "pngg", "out.txt")),
    (f"{TIMES} -o out.jsn", ("--output", "jsn", "out.json")),
    (f"block v-half {P} -o out.yaml", ("--output", "yaml", "out.txt", "out.json")),
    ("diff zb-h1 run.json --trace out.pftrace", ("--trace", "pftrace", "out.json")),
    (f"show zb-h1 {P} --svg out.jpg", ("--svg", "jpg", "out.png", "out.svg")),
    (f"make zb-h1 {P} -o out.svg --format torch-csv", ("torch-csv", "svg", "out.csv")),
    (f"show zb-h1 {P} --svg out.txt", ("--svg", "txt", "out.svg")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
    texts = {
        "s.txt": zb.make("1f1b", 2, 4).to_text(),
        "notes.txt": "hello\n",
        "empty.json": "",
        "broken.json": '{"format": "zerobubble plan 1", ',
        "list.json": "[1, 2]",
        "config.json": json.dumps(config),
        "small.json": json.dumps({"hidden_size": 3}),
        "gpt2.json": json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 1024, "vocab_size": 99}),
        "layers.json": json.dumps(zb.partition.layers_to_dict([zb.partition.Layer(1, 1, 1, 1, 1)] * 2)),
        "gpu.json": json.dumps({"format": "zerobubble gpu 1", "name": "mine"}),
        "timeline.json": json.dumps(zb.simulate(zb.make("1f1b", 2, 4), zb.Costs.uniform(2)).to_dict()),
        "costs.json": json.dumps(zb.Costs.uniform(4).to_dict()),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    (folder / "runs/first").mkdir(parents=True)
    (folder / "runs/first/run.json").touch()
    return folder


@pytest.mark.parametrize(("args", "stated"), MISTAKES, ids=[args for args, _ in MISTAKES])
def test_a_mistake_ends_in_its_cause_and_remedy(args: str, stated: Stated, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = refused(*args.split())
    states(said, *(str(folder) if value == "FOLDER" else value for value in stated))
    assert {path.name for path in folder.iterdir()} & {"out.txt", "out.svg", "out.pdf", "out.docx", "nowhere"} == set()


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        (f"plan --layers layers.json --gpu H100 {P}", ("layers.json", "split", "config.json")),
        ("plan config.json --gpu H100 --gpus 8", ("config.json", "Transformers")),
        ("compare 1f1b plan.json", ("plan.json", "plan", "-o")),
        ("diff zb-h1 run.json --costs costs.json", ("run.json", "docs/measure.md")),
    ],
)
def test_a_missing_file_of_the_pages_names_what_writes_it(
    line: str, stated: Stated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    states(refused(*line.split()), *stated)


@pytest.mark.parametrize("call", ["dualpipe --ranks 3", "dualpipe -p 3 -m 7", "chimera -p 3 -m 4", "hanayo -p 2 -m 4 --stages-per-rank 3"])
def test_the_example_of_a_shape_that_a_schedule_refuses_is_one_that_it_takes(call: str) -> None:
    done = CliRunner().invoke(main, ["show", *call.split()])
    assert done.exit_code == 2
    example = done.stderr.partition("for example, ")[2]
    counts = [int(number) for number in re.findall(r"\d+", example)]
    assert counts, done.stderr
    assert zb.make(call.split()[0], *counts).num_ranks == counts[0]
