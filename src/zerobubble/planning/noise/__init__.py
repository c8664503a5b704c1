"""Timing noise: how much a plan suffers from it, and orders that suffer less."""
