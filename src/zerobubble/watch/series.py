"""A number per step over any number of steps, as the means of at most 1024 bins."""

from __future__ import annotations

MOST_BINS = 1024


class Series:
    """Means over bins of `width` steps; bins double in width once there are too many.

    >>> series = Series()
    >>> for step in range(3000):
    ...     series.add(step, float(step))
    >>> series.width, series.means()[:2]
    (4, [1.5, 5.5])
    """

    def __init__(self) -> None:
        self.width = 1
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        while step // self.width >= MOST_BINS:
            self._double()
        self._put(step // self.width, value, 1)

    def _put(self, place: int, total: float, count: int) -> None:
        """Add `count` values to the bin at `place`."""
        missing = place + 1 - len(self._sums)
        self._sums += [0.0] * missing
        self._counts += [0] * missing
        self._sums[place] += total
        self._counts[place] += count

    def _double(self) -> None:
        self.width *= 2
        self._sums = [sum(self._sums[at : at + 2]) for at in range(0, len(self._sums), 2)]
        self._counts = [sum(self._counts[at : at + 2]) for at in range(0, len(self._counts), 2)]

    def rewind(self, step: int) -> None:
        """Discard the bins from `step` on, of a run that continues from an earlier step."""
        del self._sums[step // self.width :], self._counts[step // self.width :]

    def means(self) -> list[float | None]:
        """Return the mean of each bin, None for a bin without values."""
        return [total / count if count else None for total, count in zip(self._sums, self._counts, strict=True)]

    def points(self) -> dict[int, float]:
        """Return the means by the first step of their bin."""
        return {place * self.width: mean for place, mean in enumerate(self.means()) if mean is not None}


def mean_of(several: list[Series], width: int = 1) -> Series:
    """Return the series of the mean over all values of several series, in the widest of their bins and of `width`."""
    found = Series()
    found.width = max(width, *(series.width for series in several), 1)
    for series in several:
        for place, (total, count) in enumerate(zip(series._sums, series._counts, strict=True)):
            found._put(place * series.width // found.width, total, count)
    return found
