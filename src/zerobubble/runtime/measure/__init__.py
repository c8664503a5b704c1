"""Measures what ranks do: clocks, traces gathered from all of them, held bytes, and profiles of the real model."""
