"""`zerobubble export-weights`: the weights of a checkpoint, for Transformers."""

from __future__ import annotations

import click

from zerobubble.io import export_weights


@click.command("export-weights", short_help="Write a checkpoint's weights for Transformers.")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False))
@click.argument("folder", type=click.Path(file_okay=False))
@click.option(
    "--config", required=True, type=click.Path(exists=True), help="The model's configuration: a file, or a folder with a config.json."
)
def export_weights_verb(checkpoint: str, folder: str, config: str) -> None:
    """Write the weights of a checkpoint of zb.save as a folder that from_pretrained of Transformers reads.

    FOLDER gets config.json and safetensors, in the types that the weights were trained in. It takes one process and the memory of the
    weights, whatever number of ranks wrote the checkpoint.

    \b
    Examples:
      zerobubble export-weights checkpoint exported --config llama/config.json
    """
    export_weights(checkpoint, folder, config)
    click.echo(f"wrote {folder}")
