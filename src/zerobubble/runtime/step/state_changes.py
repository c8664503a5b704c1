"""Changes of state that several ranks make together, all of them or none, such as loading the states of hooks.

Order. All ranks first try their changes, then exchange faults. If there is any, all ranks undo theirs, and exchange faults once more.
States that can be checked beforehand are checked before anything changes, and applied last, when nothing can be refused any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch.utils._pytree import tree_map

from zerobubble.error_reports.text import describe
from zerobubble.error_reports.user_code import with_place
from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.failure.context import AgreedError
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.transport.contact import LostContactError

FAILURES = (PipelineError, LostContactError, AgreedError)
"""Errors that end the pipeline on every rank, or that every rank raises alike: they do not refuse a change."""
NOT_LOADED = "the saved state of {what} cannot be loaded: {why}"


class Change(Protocol):
    """A change that can be undone. `what` is its name in errors, such as "the scaler"."""

    what: str

    def make(self) -> None:
        """Makes the change. Raises any exception to refuse it, and may leave it half made."""

    def undo(self) -> None:
        """Restores the state before `make`, even if that raised."""


def make_all(changes: Iterable[Change], agree: Callable[[str], str], where: str = "") -> str:
    """Makes `changes` on every rank, or on none. Returns all faults of all ranks; empty if the changes are made.

    `agree` takes the faults of this rank and returns those of all ranks; `where` names this rank in them. A rank tries all of its changes
    even after one is refused, so that collectives of hooks stay in order, and no fault hides another.
    """
    listed = list(changes)
    faults = agree(_faults(listed, "make", where + NOT_LOADED))
    undo_faults = agree(_faults(listed[::-1], "undo", where + "{what} could not be restored: {why}")) if faults else ""
    return "; ".join(filter(None, (faults, undo_faults)))


def _faults(changes: Iterable[Change], method: str, words: str) -> str:
    faults = []
    for change in changes:
        try:
            getattr(change, method)()
        except FAILURES:
            raise
        except Exception as error:  # noqa: BLE001 - hooks and optimizers of users may raise anything
            faults.append(words.format(what=change.what, why=why_refused(error)))
    return "; ".join(faults)


def why_refused(error: Exception) -> str:
    """Returns the message of `error`; for what the user's code raises, with its type and line."""
    return str(error) if isinstance(error, InputError) else with_place(describe(error), error)


class HookState:
    """Loads the saved state of a hook; undone by loading its previous state."""

    def __init__(self, hook: StepHook, state: Any) -> None:
        self.what = f"the hook {type(hook).__name__}"
        self.hook = hook
        self._state = state
        self._before: Any = None

    @property
    def can_be_checked(self) -> bool:
        """Whether the hook can check its state before anything changes."""
        return type(self.hook).check_state_dict is not StepHook.check_state_dict

    def check(self) -> None:
        """Raises if the hook refuses its state; changes nothing."""
        self.hook.check_state_dict(self._state)

    def make(self) -> None:
        self._before = tree_map(lambda leaf: leaf, self.hook.state_dict())  # new containers: the hook may change its own in place
        self.hook.load_state_dict(self._state)

    def undo(self) -> None:
        if self._before is not None:
            self.hook.load_state_dict(self._before)


def load_states(
    states: Iterable[HookState], others: Sequence[Change] = (), agree: Callable[[str], str] = lambda fault: fault, where: str = ""
) -> str:
    """Loads the `states` of hooks and makes the `others`, all or nothing. `agree`, `where` and the result are those of `make_all`.

    Hooks that can be checked are loaded last. So their effects on a pipeline, such as another schedule, never have to be undone.
    """
    states = list(states)
    checked = [state for state in states if state.can_be_checked]
    faults = agree(_faults(checked, "check", where + NOT_LOADED))
    faults = faults or make_all([*(state for state in states if not state.can_be_checked), *others], agree, where)
    for state in () if faults else checked:
        state.make()
    return faults


def hook_states(hooks: Sequence[StepHook]) -> dict[str, Any]:
    """Returns the states of the hooks that have one, by `named_hooks`."""
    return {name: state for name, hook in named_hooks(hooks).items() if (state := hook.state_dict())}


def load_hook_states(hooks: Sequence[StepHook], states: Mapping[str, Any]) -> None:
    """Loads into each hook what `hook_states` returned for it. Raises `InputError` for an unknown hook, or if a hook refuses its state."""
    numbered = named_hooks(hooks)
    unknown = [name for name in states if name not in numbered]
    if unknown:
        raise InputError(
            "the state of {got} belongs to no hook of this pipeline, which has {expected}",
            got=", ".join(unknown),
            expected=", ".join(numbered) or "none",
            remedy="attach the same hooks in the same order before loading",
        )
    faults = load_states(HookState(numbered[name], state) for name, state in states.items())
    if faults:
        raise InputError(faults)


def named_hooks(hooks: Sequence[StepHook]) -> dict[str, StepHook]:
    """Returns hooks by their class and their index among hooks of that class, which does not depend on other hooks."""
    named: dict[str, StepHook] = {}
    for hook in hooks:
        kind = type(hook).__name__
        named[f"{kind}.{sum(name.startswith(f'{kind}.') for name in named)}"] = hook
    return named
