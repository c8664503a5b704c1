"""Play cases by seed: `python -m tests.procs.random_signals 17`, or `--count 400`; `--help` lists the kinds."""

from __future__ import annotations

import argparse
import sys

from tests.procs.random_signals import case as cases
from tests.procs.random_signals.campaign import play_all, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--construction", action="store_true")
    parser.add_argument("--mesh", action="store_true", help="two replicas of a pipeline, mostly on two hosts; needs root")
    parser.add_argument("--survive", action="store_true", help="replicas that go on without who is gone, some on two hosts; needs root")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--all", action="store_true", help="print those that are right, too")
    given = parser.parse_args()
    kinds = {"construction": cases.in_construction, "mesh": cases.on_a_mesh, "survive": cases.to_survive}
    draw = next((draw for kind, draw in kinds.items() if getattr(given, kind)), cases.anywhere)
    seeds = given.seeds or range(given.first, given.first + given.count)

    def show(row: object) -> None:
        if given.all or given.seeds or row.faults:
            print(row, *(f"    {text}" for text in row.texts if given.seeds), sep="\n", flush=True)

    rows = play_all([draw(seed) for seed in seeds], given.at_once, show)
    print(summary(rows))
    return any(row.faults for row in rows)


if __name__ == "__main__":
    sys.exit(main())
