"""A number per step over any number of steps, as the means of at most 1024 bins."""

from __future__ import annotations

from math import isfinite

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
        self._bins: dict[int, tuple[float, int]] = {}

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        while step // self.width >= MOST_BINS:
            self._double()
        self._put(step // self.width, value, 1)

    def _put(self, place: int, total: float, count: int) -> None:
        """Add `count` values to the bin at `place`."""
        before, number = self._bins.get(place, (0.0, 0))
        self._bins[place] = before + total, number + count

    def _double(self) -> None:
        self.width *= 2
        bins, self._bins = self._bins, {}
        for place, (total, count) in bins.items():
            self._put(place // 2, total, count)

    def rewind(self, step: int) -> None:
        """Discard the bins from `step` on, of a run that continues from an earlier step."""
        self._bins = {place: entry for place, entry in self._bins.items() if place < step // self.width}

    def means(self) -> list[float | None]:
        """Return the mean of each bin, None for a bin without values."""
        points = self.points()
        return [points.get(place * self.width) for place in range(max(self._bins, default=-1) + 1)]

    def points(self) -> dict[int, float]:
        """Return the means by the first step of their bin; those beyond the range of floats are left out."""
        means = {place * self.width: total / count for place, (total, count) in sorted(self._bins.items())}
        return {step: mean for step, mean in means.items() if isfinite(mean)}


def mean_of(several: list[Series], width: int = 1) -> Series:
    """Return the series of the mean over all values of several series, in the widest of their bins and of `width`."""
    mean = Series()
    mean.width = max(width, *(series.width for series in several), 1)
    for series in several:
        for place, (total, count) in series._bins.items():
            mean._put(place * series.width // mean.width, total, count)
    return mean
