"""Schedules from outside this package: registered in this process, or offered by entry points of installed packages."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from zerobubble.errors import InputError
from zerobubble.schedules.recipe import Recipe

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "zerobubble.schedules"
"""The entry point group. An entry maps the name of a schedule to its builder function or a `Recipe`."""


class Registry:
    """All recipes: the `published` ones, and the recipes of users and packages. Names are unique."""

    def __init__(self, published: dict[str, Recipe]) -> None:
        self.published = published
        self.registered: dict[str, Recipe] = {}

    def register(self, recipe: Recipe) -> None:
        """Add `recipe`. The same function may be registered twice (a notebook cell run twice). Another one raises `InputError`."""
        taken = self.published.get(recipe.name) or self.registered.get(recipe.name)
        if taken and _qualified_name(taken) != _qualified_name(recipe):
            message = "the schedule name {recipe!r} is taken by {taken_by}"
            raise InputError(message, recipe=recipe.name, taken_by=_qualified_name(taken), remedy="choose another")
        self.registered[recipe.name] = recipe

    def offered(self) -> dict[str, EntryPoint]:
        """Return the entry points of installed packages by name, without importing them.

        Raises `InputError` naming both packages if a name is taken twice.
        """
        offers: dict[str, EntryPoint] = {}
        for offer in _entry_points(tuple(sys.path)):
            taken = _package(offers[offer.name]) if offer.name in offers else self._owner(offer)
            if taken:
                both = f"{taken} and {_package(offer)}"
                message = "the schedule name {offer!r} is taken twice, by {both}"
                raise InputError(message, offer=offer.name, both=both, remedy="rename or uninstall one of them")
            offers[offer.name] = offer
        return offers

    def _owner(self, offer: EntryPoint) -> str:
        """Return the package that already uses the name of `offer`, "" if none. A package may register what it also offers."""
        mine = self.published.get(offer.name) or self.registered.get(offer.name)
        home = mine.build.__module__.partition(".")[0] if mine else ""
        return "" if offer.module.partition(".")[0] == home else home

    def load(self, offer: EntryPoint) -> Recipe:
        """Import the schedule of an entry point. Raises `InputError` naming the package and the cause if that fails."""
        try:
            loaded = offer.load()
            if offer.name in self.registered:
                return self.registered[offer.name]
            return replace(loaded, name=offer.name) if isinstance(loaded, Recipe) else Recipe(offer.name, loaded)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            message = "the schedule {offer!r} of package {package} cannot be loaded: {cause}"
            raise InputError(message, offer=offer.name, package=_package(offer), cause=cause) from error

    def find(self, name: str) -> Recipe | None:
        """Return the recipe called `name`, None if there is none. Entry points are searched last, since the first search is slow."""
        recipe = self.published.get(name) or self.registered.get(name)
        if recipe is None and name in (offered := self.offered()):
            return self.load(offered[name])
        return recipe

    def everything(self) -> tuple[dict[str, Recipe], list[str]]:
        """Return every recipe by name, and a message for each installed one that cannot be loaded."""
        recipes, notes = self.published | self.registered, []
        for name, offer in self.offered().items():
            try:
                recipes[name] = self.load(offer)
            except InputError as error:
                notes.append(str(error))
        return recipes, notes


@cache
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Those of our group on a search path. They are read once: each reading opens a file of every installed package."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return tuple(entry_points(group=ENTRY_POINTS))


def _qualified_name(recipe: Recipe) -> str:
    """Return the module and name of a recipe's builder."""
    return f"{recipe.build.__module__}.{getattr(recipe.build, '__qualname__', type(recipe.build).__qualname__)}"


def _package(offer: EntryPoint) -> str:
    return offer.dist.name if offer.dist else offer.value
