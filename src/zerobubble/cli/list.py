"""`zerobubble list`: the schedules there are."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from zerobubble.cli.options import json_option
from zerobubble.schedules import Recipe, shelf


@click.command("list")
@json_option
def list_schedules(as_json: bool) -> None:
    """List the schedules: the published ones and those that installed packages add.

    \b
    Examples:
      zerobubble list
      zerobubble list --json
    """
    recipes, notes = shelf.everything()
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps([_as_dict(recipe) for recipe in recipes.values()], indent=2, default=str))
    else:
        _print(list(recipes.values()))


def _print(recipes: list[Recipe]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("stages per rank", max_width=9)
    table.add_column("what it is")
    for recipe in recipes:
        stages = f"{recipe.stages_per_rank} or any" if recipe.any_stages else str(recipe.stages_per_rank)
        table.add_row(recipe.name, stages, recipe.summary)
    Console().print(table)


def _as_dict(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "stages_per_rank": recipe.stages_per_rank,
        "any_stages": recipe.any_stages,
        "needs": recipe.condition,
        "options": recipe.options,
        "splits": recipe.splits,
        "torch_csv": recipe.torch_csv,
        "summary": recipe.summary,
        "formulas": recipe.formulas,
        "good_for": recipe.good_for,
        "source": recipe.source,
    }
