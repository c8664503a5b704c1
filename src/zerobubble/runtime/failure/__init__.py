"""Turns the failure of one rank into one error on every rank, names the culprit, and leaves nothing open.

The life of a pipeline, on each rank. All ranks take the same arrows; on a failure, all ranks that are alive.

    rendezvous --> build --> agree --> connect --> idle <--> in a call --> closed
         |           |         |          |          |           |           ^
         +-----------+---------+----------+----------+-----------+--> failing +
                                                                         |
                        rendezvous (fewer ranks, `survive=True`) <-------+

| state | what a rank does | entered by | left by |
|---|---|---|---|
| rendezvous | meets the other ranks in the store | `transport.rendezvous` | all records written, or a fault: then no rank has a pipeline |
| build | builds its own stages, alone | `setup.build_stages` | a fault is kept, not raised: the other ranks wait for it in `agree` |
| agree | compares arguments and models with all ranks | `setup_ranks.SetupRanks.agree` | one `InputError` on every rank, or none |
| connect | opens channels, broadcasts shared parameters | `Transport.open` | all channels open |
| idle | runs user code; its threads answer the other ranks | exit of `FailureContext` | a call, or `close` |
| in a call | a step, clipping, a checkpoint | `FailureGuard.during` | the call returns, or any error inside |
| failing | finds out who is to blame, publishes a report, aborts | `FailureGuard.fail` | the report is known |
| closed | nothing is open, every call raises `PipelineError` | `FailureGuard.close` | never; survivors make a new session |

The order within *failing* is what makes every rank raise the same error:

1. Publish the report, or find the one published first. The store keeps the first report, so concurrent failures agree on one.
2. Abort what the device does. Peers that wait for this rank's messages wake only when its connections close, which comes later.
3. Release stages and hooks, then close the connections. A peer that loses contact then finds the report.
4. Wait a few seconds until the other ranks have read it: this process may host the store.

Modules by state. `guard.FailureGuard` is the one object of a pipeline for all of this; every call enters a `context` of it.

- Before the first call: `setup_ranks` agree on all arguments, and `setup_timeout` bounds the wait for other ranks.
- In a call: `context` admits one thread and describes what a rank does. `guard` finds another pipeline that it waits in.
- Detection beyond lost connections: `processes` watches the processes of other ranks, `torchrun` its agent, `termination` handles SIGTERM,
  and `watch` counts what the OOM killer ended.
- Failing: `watch` publishes and reads reports through the store, and `store_thread` makes all calls of the store. `blame` finds the failed
  rank if no rank has reported; `report` describes an error. `error_reports` shows it on the screen and writes torchrun's error file.
- Forked children take no part in these states: `forked` detaches them.

This package imports the transport and nothing above it. It knows what a rank computes only by its description.
"""
