"""What is done when a rank fails: every rank that lives raises the same error, which names the culprit, and nothing stays open.

It imports the transport and nothing above it: what a rank computes is known here only by its description. `guard.FailureGuard` is the one
object of a pipeline for all of this: what a rank does together with others runs in a `frame` of it.

How a failure is told: `watch` listens to the other ranks through the store, all of whose calls `store_thread` makes; `report` and
`error_text` put an error into words, `blame` finds the culprit where no rank knows it, and `elastic` writes torchrun's file.

How it is noticed beyond messages that stay out: `processes` hears that a rank's process ends, `forked` keeps children out of it,
`termination` speaks for a rank that gets SIGTERM, `memory_kills` counts what the system ended for want of memory, and `patience`
listens while the pipeline is made.

What a rank is at: `activity` in words, `turn` for one thread at a time, `pipelines` for the others of this process.
"""
