"""What carries messages between ranks. Below it are only values; nothing here knows stages, schedules or what is done about a failure.

`zerobubble.transport` has the public names. To bring a transport of your own, write a class with the methods of `Endpoint` and give an
instance of it to each rank's `Pipeline(transport=...)`. `endpoint` has the protocol: an `Endpoint` carries lines of tensors, each in the
order in which they were sent, and tells with its `Capabilities` what else it can do. Everything above asks for capabilities, and never for
the class of an endpoint.

`gloo`, `nccl` and `shared_memory` are the endpoints that a pipeline has by itself, and `choice` is the one place that chooses among them.
Ranks meet in `meeting`, before anything is connected. `control` has the small host-side messages: an enumeration of their topics, each
with the type of its payload. `contact` turns what goes wrong with a message into one exception, and remembers whom this rank waits for.
`transport.Transport` is the front of all of these, over all ranks of a mesh (`mesh`). What a pipeline does with its messages, or the
replicas of a stage with their `sums`, they do among `peers`, in which ranks count from 0.
"""
