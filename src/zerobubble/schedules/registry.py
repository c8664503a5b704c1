"""Schedules of the user's own: registered in this process, or installed by another package's entry points."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerobubble.errors import InputError
from zerobubble.schedules.recipe import Recipe

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "zerobubble.schedules"
"""The entry point group: name of the schedule = its builder function, or a `Recipe`."""


class Registry:
    """The recipes beside the `published` ones, each name once."""

    def __init__(self, published: dict[str, Recipe]) -> None:
        self.published = published
        self.registered: dict[str, Recipe] = {}

    def register(self, recipe: Recipe) -> None:
        """Add `recipe`; the same function may come again (a notebook's cell run twice), another one by its name may not."""
        taken = self.published.get(recipe.name) or self.registered.get(recipe.name)
        if taken and _home(taken) != _home(recipe):
            raise InputError(f"the schedule name {recipe.name!r} is taken by {_home(taken)}: choose another")
        self.registered[recipe.name] = recipe

    def offered(self) -> dict[str, EntryPoint]:
        """What installed packages offer, by name, nothing imported yet. Raises `InputError` naming both packages for a name taken."""
        from importlib.metadata import entry_points  # slow to import, and seldom needed

        found: dict[str, EntryPoint] = {}
        for offer in entry_points(group=ENTRY_POINTS):
            taken = _package(found[offer.name]) if offer.name in found else self._owner(offer)
            if taken:
                both = f"{taken} and {_package(offer)}"
                raise InputError(f"the schedule name {offer.name!r} is taken twice, by {both}: rename or uninstall one of them")
            found[offer.name] = offer
        return found

    def _owner(self, offer: EntryPoint) -> str:
        """The package that has the name of `offer` already, if any; one may register the very schedule that it offers."""
        mine = self.published.get(offer.name) or self.registered.get(offer.name)
        home = mine.build.__module__.partition(".")[0] if mine else ""
        return "" if offer.module.partition(".")[0] == home else home

    def load(self, offer: EntryPoint) -> Recipe:
        """Import what a package offers. Raises `InputError` naming the package and the cause where that fails."""
        try:
            made = offer.load()
            if offer.name in self.registered:
                return self.registered[offer.name]
            return replace(made, name=offer.name) if isinstance(made, Recipe) else Recipe(offer.name, made)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise InputError(f"the schedule {offer.name!r} of package {_package(offer)} cannot be loaded: {cause}") from error

    def find(self, name: str) -> Recipe | None:
        """The recipe by this name; installed packages are asked last."""
        recipe = self.published.get(name) or self.registered.get(name)
        if recipe is None and name in (offered := self.offered()):
            return self.load(offered[name])
        return recipe

    def everything(self) -> tuple[dict[str, Recipe], list[str]]:
        """Every recipe by name, and a sentence for each installed one that cannot be loaded."""
        recipes, notes = self.published | self.registered, []
        for name, offer in self.offered().items():
            try:
                recipes[name] = self.load(offer)
            except InputError as error:
                notes.append(str(error))
        return recipes, notes


def _home(recipe: Recipe) -> str:
    """Where a recipe's builder was written."""
    return f"{recipe.build.__module__}.{getattr(recipe.build, '__qualname__', type(recipe.build).__qualname__)}"


def _package(offer: EntryPoint) -> str:
    return offer.dist.name if offer.dist else offer.value
