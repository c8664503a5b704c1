"""Plays a rank's row of a program."""
