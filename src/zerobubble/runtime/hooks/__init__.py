"""Hooks into training steps: shared parameters, replicas, clipping, post-validation, telemetry, planning.

Hooks that sum gradients run in a fixed order. Earlier gradients are set aside first, then stages that share parameters sum, then replicas,
then the sum is divided by the number of microbatches, and earlier gradients are added back. Every rank starts the same sums in the same
order under any schedule. A collective in a different order would deadlock or mix up tensors.
"""
