"""`zerobubble list`: the known schedules."""

from __future__ import annotations

import json
from typing import Any

import click

from zerobubble.cli.inputs.options import json_option
from zerobubble.schedules import Recipe, registry


@click.command("list")
@json_option
def list_schedules(as_json: bool) -> None:
    """List the known schedules: the published ones, and those of installed packages.

    \b
    Examples:
      zerobubble list
      zerobubble list --json
    """
    recipes, notes = registry.everything()
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps([_as_dict(recipe) for recipe in recipes.values()], indent=2, default=str))
    else:
        _print(list(recipes.values()))


def _print(recipes: list[Recipe]) -> None:
    """Prints one line per schedule. Lines are not wrapped, since terminals wrap them and programs at a pipe read whole lines."""
    rows = [("name", "stages", "description")]
    rows += [(r.name, f"{r.stages_per_rank} or any" if r.any_stages else str(r.stages_per_rank), r.summary) for r in recipes]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, stages, summary in rows:
        click.echo(f"{name.ljust(widths[0])}  {stages.ljust(widths[1])}  {summary}")


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
