"""What is done when a rank fails: every rank that lives raises the same error, which names the culprit, and nothing stays open.

It imports the transport and nothing above it: what a rank computes is known here only by its description. `guard.FailureGuard` is the one
object of a pipeline for all of this. `watch` listens to the other ranks through the store, `report` puts an error into words, and `blame`
finds the culprit where no rank knows it.
"""
