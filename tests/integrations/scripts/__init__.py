"""Training scripts in the forms that people publish, each with the few lines that a pipeline changes.

A script is a module with `main(folder, pipelined)`. It writes `figures.json` (what a user prints) and `weights.pt` (the whole model) to the
folder, from the first rank. Models are in float64, so that one process and two ranks agree to many digits.
"""

NAMES = (
    "accelerate_loop",
    "adapters",
    "causal_lm",
    "class_weights",
    "distillation",
    "fabric_gpt",
    "lightning_classifier",
    "masked_lm",
    "nano_gpt",
    "qlora",
    "seq2seq",
    "supervised_tuning",
)
