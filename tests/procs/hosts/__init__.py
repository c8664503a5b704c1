"""Several hosts on one machine: a network namespace each, with a cable between them whose latency, jitter, loss and cuts a test sets."""
