"""Carries messages between ranks. Only values are below it; nothing here knows stages, schedules or the handling of failures.

`zerobubble.transport` has the public names. To use your own transport, write a class with the methods of `Endpoint` and pass an instance
of it to each rank's `Pipeline(transport=...)`. `endpoint` has the protocol: an `Endpoint` carries lines of tensors, each in the order of
its sends, and declares with its `Capabilities` what else it can do. The layers above ask for capabilities and never for the class of an
endpoint.

`gloo`, `nccl`, `shared_memory` and `staged` are the built-in endpoints, and only `choice` chooses among them. `rendezvous` brings the ranks
together before anything is connected. `control` has the small host-side messages: an enumeration of their topics, each with the type of
its payload. `contact` turns every failure of a message into one exception, and records for whom this rank waits. `transport.Transport` is
the entry point to all of these, over all ranks of a mesh (`mesh`). A pipeline and the replicas of a stage use it through `peers`, in which
ranks count from 0.

Two rules make failures visible, and every endpoint keeps them. No wait is unbounded: it ends with the connection or with the timeout. And
closing an endpoint wakes the ranks at the other ends, which then look for the reason.
"""
