"""Checkpoints of the training state under the names of the unsplit model, so that another pipeline, or one device, can continue.

Order. A crash at any moment leaves a complete checkpoint. Files are written into a draft folder next to the path, then the metadata and the
checksums. Finally, the folder is renamed into place. Loading is all or nothing, too: every rank reads into host memory and compares, all
ranks agree that nothing is wrong, and only then is the training state changed.

- `checkpoint` has `save` and `load`; `write` and `read` implement them.
- `checkpointed` describes what is saved, a pipeline or a whole model, and `ranks` lets the processes agree.
- `contents` defines the contents of a checkpoint, with `names`, `states` and `tensor_parts`.
- `parts` writes what each rank has, in the `background` if asked to.
- `folder` puts a checkpoint in place whole or not at all, with its `checksums`.

Tensors are written by torch.distributed.checkpoint.
"""
