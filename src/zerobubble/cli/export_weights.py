"""`zerobubble export-weights`: the weights of a checkpoint in the format of Transformers."""

from __future__ import annotations

import json

import click

from zerobubble.cli.inputs.options import Existing, json_option
from zerobubble.io import export_weights


@click.command("export-weights")
@click.argument("checkpoint", type=Existing())
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--config", required=True, type=Existing(), help="Configuration of the model: a file, or a folder with a config.json.")
@click.option("--adapter", type=Existing(), help="Folder with the adapter_config.json, after LoRA.")
@json_option
def export_weights_command(checkpoint: str, folder: str, config: str, adapter: str | None, as_json: bool) -> None:
    """Write the weights of a zb.save checkpoint to a folder for from_pretrained of Transformers.

    \b
    Examples:
      zerobubble export-weights checkpoint exported --config llama/config.json
      zerobubble export-weights checkpoint exported --config llama/config.json --adapter lora

    FOLDER gets config.json and safetensors, in the dtypes of training. With --adapter, it gets the adapter alone, for PeftModel. This needs
    one process and memory for the weights, however many ranks wrote the checkpoint.
    """
    export_weights(checkpoint, folder, config, adapter=adapter)
    click.echo(json.dumps({"folder": folder}) if as_json else f"wrote {folder}")
