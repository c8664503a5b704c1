"""Checkpoints: what is trained, under the names of the unsplit model, so that another pipeline, or one device, can go on with it.

`trained` is what is saved: a pipeline's stages, or a whole model alone; `together` is how ranks agree. `names` are those under which the
parameters of all stages are kept, `contents` what a checkpoint holds, with `optimizer_state`, `scaler_state` and `random_states`. `write`
has it written in `parts`, which `planning` shares out, by all ranks at once, in the `background` if asked to; `folder` puts it in its place
whole or not at all; `read` reads it, when its `checksums` match, and changes everything or nothing. `checkpoint` has `save` and `load`.
Tensors are written by torch.distributed.checkpoint.
"""
