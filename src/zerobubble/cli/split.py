"""`zerobubble split`: where a model of Transformers is cut, from its configuration alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from zerobubble.cli.options import json_option
from zerobubble.errors import InputError

if TYPE_CHECKING:
    from zerobubble.models.by_hand import ByHand


@click.command("split", short_help="Show where a model is cut.")
@click.argument("config", type=click.Path(exists=True))
@click.option("--stages", type=click.IntRange(min=1), required=True, help="Into how many stages.")
@click.option("--cuts", help="Parts with which the stages behind the first begin, or numbers of layers, with commas; or a Megatron layout.")
@json_option
def split_verb(config: str, stages: int, cuts: str | None, as_json: bool) -> None:
    """Show where a model is cut into stages, as zb.split does it.

    CONFIG is a configuration of Transformers: a config.json, or the folder with it. No weights are read or made.

    \b
    Examples:
      zerobubble split llama/config.json --stages 8
      zerobubble split llama/config.json --stages 4 --cuts 7,9,9,7
      zerobubble split llama/config.json --stages 4 --cuts "Et*7|t*9|t*9|t*7L"
    """
    try:
        from zerobubble.models.from_config import split_config
    except ModuleNotFoundError as error:
        raise InputError(f"zerobubble split needs {error.name}: pip install torch transformers") from error
    found = split_config(config, _cuts(cuts))
    if as_json:
        summary: dict[str, Any] = {"stages": [stage._asdict() for stage in found.stages(stages)], "tied": found.tied(stages)}
        click.echo(json.dumps(summary, indent=1))
    else:
        click.echo(found.describe(stages))


def _cuts(text: str | None) -> ByHand | None:
    """What `--cuts` says: numbers or names where it has commas or is one, else a layout."""
    if text is None or "|" in text:
        return text
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else parts
