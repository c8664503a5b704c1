"""Run folders from anyone: `zerobubble watch` shows what it can read, or names the damaged file, each time it is asked."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pure.test_hostile_files import PARTS, WHOLES
from tests.refusals import raises
from tests.run_folders import Recorded
from zerobubble import InputError
from zerobubble.run_folder import BEGIN, FORM, HEADER, MOST_RANKS, log_name
from zerobubble.watch.figures import figures
from zerobubble.watch.page import page_parts, timeline_parts
from zerobubble.watch.rank_log import LONGEST_LINE
from zerobubble.watch.run import WatchedRun

LONGEST_S = 10.0
MOST_BYTES = 200 << 20


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    run = Recorded(tmp_path / "run")
    for number in range(6):
        run.step(number)
    run.details(3)
    run.details(5, slot=1)
    run.end(1, {"message": "rank 1 failed", "rank": 1, "op": "run 1F3"})
    return run


def shown(run: WatchedRun) -> str:
    """All that the page gets of a run, as the server sends it."""
    run.refresh()
    state = figures(run) | {"now": 0.0}
    return json.dumps([state, page_parts([run], [state]), timeline_parts([run])], allow_nan=False)


def kept(run: WatchedRun) -> WatchedRun:
    return run


def outcome(open_run: Callable[[Any], WatchedRun], what: Any) -> str:
    """What is shown of a run, or the error that names a file of it."""
    try:
        return shown(open_run(what))
    except InputError as error:
        return f"refused: {error}"


def replace_part(file: Path, draw: random.Random) -> None:
    """Another JSON text in the place of one value."""
    lines = file.read_text().splitlines()
    place = draw.randrange(len(lines))
    marker = "a part that no file has"
    data = json.loads(lines[place])
    parent, key = draw.choice(list(parents(data)))
    parent[key] = marker
    lines[place] = json.dumps(data).replace(json.dumps(marker), draw.choice(list(PARTS.values())))
    file.write_text("\n".join(lines) + "\n", errors="surrogatepass")


def parents(data: Any) -> Any:
    """The containers in a JSON value, each with its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from parents(data[key])


def remove_part(file: Path, draw: random.Random) -> None:
    data = [json.loads(line) for line in file.read_text().splitlines()]
    parent, key = draw.choice(list(parents(draw.choice(data))))
    del parent[key]
    file.write_text("".join(json.dumps(line) + "\n" for line in data))


def change_bytes(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 3, 30))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    file.write_bytes(data)


def replace_whole(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.choice(list(WHOLES.values()))(file.read_text()))


def exchange(file: Path, draw: random.Random) -> None:
    """The content of another file of the run."""
    file.write_bytes(draw.choice(sorted(file.parent.iterdir())).read_bytes())


MUTATIONS = (replace_part, replace_part, replace_part, remove_part, change_bytes, replace_whole, exchange)


@pytest.mark.parametrize("num_mutations", [20, pytest.param(600, marks=pytest.mark.long)])
def test_damaged_files_are_named_each_time_and_raise_nothing_else(recorded: Recorded, tmp_path: Path, num_mutations: int) -> None:
    whole, folder = recorded.folder, tmp_path / "damaged"
    names = sorted(file.name for file in whole.iterdir())
    num_refused = 0
    for seed in range(num_mutations):
        draw = random.Random(seed)
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        open_before = WatchedRun(str(folder))
        before = shown(open_before)
        file = folder / draw.choice(names)
        draw.choice(MUTATIONS)(file, draw)
        os.utime(file, ns=(seed, seed))
        began = time.process_time()
        outcomes = [outcome(WatchedRun, str(folder)), *(outcome(kept, open_before) for _ in range(2))]
        assert time.process_time() - began < LONGEST_S, seed
        is_refused = [text.startswith("refused") for text in outcomes]
        assert len(set(is_refused)) == 1, (seed, outcomes)
        if is_refused[0]:
            num_refused += 1
            assert len(set(outcomes)) == 1
            assert folder.name in outcomes[0]
            assert "Traceback" not in outcomes[0]
            shutil.copytree(whole, folder, dirs_exist_ok=True)
            assert shown(open_before) == before, seed
    assert num_refused > num_mutations / 10


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_socket(file: Path) -> None:
    cwd = os.getcwd()
    os.chdir(file.parent)  # an address has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(file.name)
    os.chdir(cwd)


def link_to_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def link_to_itself(file: Path) -> None:
    file.symlink_to(file.name)


def link_to_unreadable(file: Path) -> None:
    file.symlink_to("/proc/self/mem")  # a regular file, of which no byte can be read


@pytest.mark.parametrize("make", [make_pipe, make_socket, link_to_device, link_to_itself, link_to_unreadable, Path.mkdir])
@pytest.mark.parametrize("name", [HEADER, log_name(0), "rank-1.detail-0.json"])
def test_only_regular_files_are_read(recorded: Recorded, make: Callable[[Path], None], name: str) -> None:
    open_before = WatchedRun(str(recorded.folder))
    file = recorded.folder / name
    file.unlink()
    make(file)
    for _ in range(2):
        with raises(InputError, file=str(file)):
            WatchedRun(str(recorded.folder))
        with raises(InputError, file=str(file)):
            open_before.refresh()


def peak_of(folder: Path) -> int:
    """The most bytes of Python's memory while a run is shown."""
    tracemalloc.start()
    try:
        outcome(WatchedRun, str(folder))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many_ranks(run: Recorded) -> None:
    run.write(0, {BEGIN: FORM, "at": time.time(), "host": "elsewhere", "pid": 1, "ranks": MOST_RANKS})


def too_many_ranks(run: Recorded) -> None:
    run.write(0, {BEGIN: FORM, "at": time.time(), "host": "elsewhere", "pid": 1, "ranks": 10**9})


def many_stages(run: Recorded) -> None:
    passes = {f"{stage}F": 1.0 for stage in range(3000)}
    run.write(0, {"at": time.time(), "step": 1000, "seconds": 1.0, "bubble": 0.5, "loss": 1.0, "passes": passes})


def long_lines(run: Recorded) -> None:
    with (run.folder / log_name(0)).open("ab") as file:
        for length in (LONGEST_LINE + 1, 9 * LONGEST_LINE):
            file.write(b"[" * length + b"\n")
    run.step(9)


@pytest.mark.parametrize("damage", [pytest.param(many_ranks, marks=pytest.mark.long), too_many_ranks, many_stages, long_lines])
def test_a_line_takes_memory_by_its_length(recorded: Recorded, damage: Callable[[Recorded], None]) -> None:
    damage(recorded)
    assert peak_of(recorded.folder) < MOST_BYTES


def test_a_line_that_is_too_long_is_passed_over(recorded: Recorded) -> None:
    long_lines(recorded)
    run = WatchedRun(str(recorded.folder))
    assert (run.step, figures(run)["unreadable_lines"]) == (9, {log_name(0): 2})


def test_a_log_that_is_another_file_is_read_from_its_beginning(recorded: Recorded) -> None:
    run = WatchedRun(str(recorded.folder))
    for rank in range(2):
        (recorded.folder / log_name(rank)).unlink()
    other = Recorded(recorded.folder)
    other.step(2)
    run.refresh()
    assert (run.step, run.logs[0].end) == (2, None)


def test_a_folder_that_is_gone_is_refused(recorded: Recorded) -> None:
    run = WatchedRun(str(recorded.folder))
    shutil.rmtree(recorded.folder)
    for _ in range(2):
        with raises(InputError, folder=str(recorded.folder)):
            run.refresh()
