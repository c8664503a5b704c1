"""The states of hooks: taken from all of them, and given back to all of them or to none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_map

from zerobubble.errors import InputError
from zerobubble.runtime.step.all_or_nothing import FAILURES, Change, make_all, why_refused
from zerobubble.runtime.step.hook import StepHook


class HookState:
    """Gives a hook its saved state; undone by giving it the state that it had."""

    def __init__(self, hook: StepHook, state: Any) -> None:
        self.what = f"the hook {type(hook).__name__}"
        self.hook = hook
        self._state = state
        self._before: Any = None

    @property
    def can_be_checked(self) -> bool:
        """Whether the hook can be asked before anything changes."""
        return type(self.hook).check_state_dict is not StepHook.check_state_dict

    def check(self) -> None:
        """Raise what the hook has against its state; nothing changes."""
        self.hook.check_state_dict(self._state)

    def make(self) -> None:
        """See `Change`."""
        self._before = tree_map(lambda leaf: leaf, self.hook.state_dict())  # new containers: the hook may change its own in place
        self.hook.load_state_dict(self._state)

    def undo(self) -> None:
        """See `Change`."""
        if self._before is not None:
            self.hook.load_state_dict(self._before)


def load_states(
    states: Iterable[HookState], others: Sequence[Change] = (), agree: Callable[[str], str] = lambda fault: fault, where: str = ""
) -> str:
    """Give hooks their `states` and make the `others`, all or nothing; `agree`, `where` and the result are those of `make_all`.

    Hooks that can be checked are asked first and loaded last, when nothing can be refused any more: what they do to a pipeline, such as
    playing another schedule, need not be undone.
    """
    states = list(states)
    checked = [state for state in states if state.can_be_checked]
    faults = agree(
        "; ".join(f"{where}{state.what} cannot take over what was saved: {why}" for state in checked if (why := _why_not(state)))
    )
    faults = faults or make_all([*(state for state in states if not state.can_be_checked), *others], agree, where)
    for state in () if faults else checked:
        state.make()
    return faults


def _why_not(state: HookState) -> str:
    try:
        state.check()
    except FAILURES:
        raise
    except Exception as error:  # noqa: BLE001 - hooks of users may raise anything
        return why_refused(error)
    return ""


def states_of(hooks: Sequence[StepHook]) -> dict[str, Any]:
    """The states of the hooks that have one, by the number and the class of the hook."""
    return {name: state for name, hook in _numbered(hooks).items() if (state := hook.state_dict())}


def load_states_of(hooks: Sequence[StepHook], states: Mapping[str, Any]) -> None:
    """Give each hook what `states_of` has of it. Raises `InputError` for a state that belongs to no hook, or that its hook refuses."""
    numbered = _numbered(hooks)
    unknown = [name for name in states if name not in numbered]
    if unknown:
        raise InputError(
            f"the state of {', '.join(unknown)} belongs to no hook of this pipeline, which has {', '.join(numbered) or 'none'}: "
            "attach the same hooks in the same order before loading"
        )
    faults = load_states(HookState(numbered[name], state) for name, state in states.items())
    if faults:
        raise InputError(faults)


def _numbered(hooks: Sequence[StepHook]) -> dict[str, StepHook]:
    return {f"{number}.{type(hook).__name__}": hook for number, hook in enumerate(hooks)}
