"""`examples/multihost.sh` trains across hosts, emulated by namespaces; the launch files differ only in how they start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.procs.exhaustive import EXHAUSTIVE
from tests.procs.hosts.cable import INTERFACE, address_of
from tests.procs.hosts.hosts import ROOT, Hosts, Quality, why_not
from tests.refusals import states

pytestmark = [pytest.mark.ranks_wait, pytest.mark.skipif(bool(why_not()), reason=why_not())]

LONGEST_S = 400.0
LAUNCHERS = ("by_hand.sh", "slurm.sh", "kubernetes.yaml")


def commands_of(launcher: str, host: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What a launcher runs on a host, and with which variables, besides those of this test's own machine."""
    file = ROOT / "examples" / "launch" / launcher
    if launcher == "by_hand.sh":
        return [str(file), str(host)], {"HEAD": address_of(0)}
    text = file.read_text(encoding="utf-8")
    if launcher == "kubernetes.yaml":
        (command,) = re.findall(r'command: \["bash", "-c", "(.*)"\]', text)
        variables = dict(re.findall(r'name: (\w+), value: "?([\w.-]+)"?', text))
        return ["bash", "-c", command], {**variables, "HEAD": address_of(0), "JOB_COMPLETION_INDEX": str(host)}
    # srun starts the last words of its line on every host; here it does so on the one that it is given.
    (folder / "srun").write_text('#!/usr/bin/env bash\nexec "${@: -3}"\n')
    (folder / "scontrol").write_text(f"#!/usr/bin/env bash\nprintf '%s\\n' {address_of(0)} {address_of(1)}\n")
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": str(host)}
    return [str(file)], {**slurm, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("host", range(2))
def test_all_launchers_start_the_same(host: int, tmp_path: Path) -> None:
    """Whichever a host is started by, it runs the same command: one of them may train for all."""
    words = tmp_path / "python"
    words.write_text('#!/usr/bin/env bash\necho "$GLOO_SOCKET_IFNAME" "$@"\n')
    words.chmod(0o755)
    nodes = f"--nnodes 2 --node-rank {host} --master-addr {address_of(0)} --master-port 29500"
    for launcher in LAUNCHERS:
        command, variables = commands_of(launcher, host, tmp_path)
        environment = {**os.environ, "RANKS": "1", "IFACE": INTERFACE, **variables, "PYTHON": str(words)}
        output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=LONGEST_S).stdout
        output, program = output.split(" --nproc-per-node 1 --max-restarts 0 ")
        assert output == f"{environment['IFACE']} -m torch.distributed.run {nodes}"
        assert (ROOT / program.strip()).resolve() == ROOT / "examples" / "multihost.py"


def start(hosts: Hosts, host: int, launcher: str, folder: Path) -> subprocess.Popen[str]:
    command, variables = commands_of(launcher, host, folder)
    environment = {**os.environ, "PYTHON": sys.executable, "RANKS": "1", "IFACE": INTERFACE, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(hosts.command(host, *command), cwd=ROOT, env=environment, text=True, **pipes)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS if EXHAUSTIVE else ["slurm.sh"])
def test_two_hosts_train_by_this_launcher(launcher: str, tmp_path: Path) -> None:
    with Hosts(["zerobubble-0", "zerobubble-1"], Quality(delay_ms=1, jitter_ms=1, loss=0.001)) as hosts:
        running = [start(hosts, host, launcher, tmp_path) for host in range(2)]
        output = [process.communicate(timeout=LONGEST_S) for process in running]
        assert [process.returncode for process in running] == [0, 0], output
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output[0][0])]
    assert losses[-1] < losses[0]
    states(output[0][0], 2, "ranks", "messages")


@pytest.mark.long
def test_a_host_that_vanishes_ends_the_launcher_of_the_other(tmp_path: Path) -> None:
    """torchrun's own agent on the other host ends, too, and says which rank failed and why."""
    with Hosts(["zerobubble-0", "zerobubble-1"], Quality()) as hosts:
        program = tmp_path / "program.py"
        text = (ROOT / "examples" / "multihost.py").read_text(encoding="utf-8")
        program.write_text(text.replace("range(20)", "range(10**9)").replace("timeout=60", "timeout=10"))
        running = []
        for host in range(2):
            command = hosts.command(host, str(ROOT / "examples" / "multihost.sh"), str(program))
            variables = {"NODES": "2", "NODE": str(host), "HEAD": address_of(0), "RANKS": "1", "IFACE": INTERFACE, "PYTHON": sys.executable}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            running.append(subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes))
        assert running[0].stdout is not None
        assert running[0].stdout.readline().startswith("step 5: loss")
        hosts.cut(1)
        began = time.monotonic()
        _, output = running[0].communicate(timeout=LONGEST_S)
        assert running[0].returncode != 0
        states(output, "rank 1", "answer")
        assert time.monotonic() - began < 200
        running[1].kill()
        running[1].communicate()
