"""Where messages are sent and where their receives are posted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from zerobubble.ir import Schedule
from zerobubble.program import Action, Channel, Compute, Program, Recv, Send
from zerobubble.rules import MOVES, makes, user_ops, uses
from zerobubble.verify_program import Model, Player


def place_sends(schedule: Schedule) -> Program:
    """Compute actions in schedule order, each value that another rank uses sent at once after it is made."""
    forward_only = schedule.is_forward_only
    rows = []
    for rank, row in enumerate(schedule.rows):
        actions: list[Action] = []
        for op in row:
            actions.append(Compute(op))
            for value in makes(op, schedule.num_stages, forward_only):
                if value.stuff in MOVES:
                    peer = schedule.rank_of(user_ops(value)[0].stage, value.microbatch)
                    if peer != rank:
                        actions.append(Send(value, peer))
        rows.append(tuple(actions))
    return Program(schedule.name, schedule.placement, schedule.num_microbatches, tuple(rows), schedule.microbatch_routes)


def place_receives(program: Program, prefetch: int) -> Program:
    """Post each receive, in the channel's order, before the pass that uses the message `prefetch` places ahead of it.

    The order of a channel is the sender's. A receive stands no later than the first use of its own or any later message.
    """
    inbox: list[dict[Channel, list[Recv]]] = [defaultdict(list) for _ in program.rows]
    for rank, _, channel, action in program.channels():
        inbox[action.peer][channel].append(Recv(action.value, rank))
    rows = []
    for rank, row in enumerate(program.rows):
        used_at = {}
        for position, action in enumerate(row):
            if isinstance(action, Compute):
                used_at.update((value, position) for value in uses(action.op, program.num_stages))
        posts: dict[int, list[Action]] = defaultdict(list)
        for receives in inbox[rank].values():
            latest = [used_at[receive.value] for receive in receives]
            for k in range(len(latest) - 2, -1, -1):
                latest[k] = min(latest[k], latest[k + 1])
            for k, receive in enumerate(receives):
                posts[latest[k - prefetch] if k >= prefetch else 0].append(receive)
        rows.append(tuple(a for position, action in enumerate(row) for a in (*posts[position], action)))
    return replace(program, rows=tuple(rows))


def hoist_receives(program: Program) -> Program:
    """Post receives earlier wherever a send that waits for its receive would stop the pipeline.

    Posting never waits, so moving a receive up is always allowed; where ranks stand still, each waiting send gets its receive
    at the place its receiver has reached.
    """
    player = Player(program, Model.RENDEZVOUS)
    while True:
        player.play()
        sends = [(rank, action) for rank, action, _ in player.stuck() if isinstance(action, Send)]
        if not sends:
            return replace(program, rows=tuple(map(tuple, player.rows)))
        for rank, send in sends:
            row, head = player.rows[send.peer], player.heads[send.peer]
            receive = Recv(send.value, rank)
            del row[row.index(receive, head)]
            row.insert(head, receive)
