"""Executes a rank's row of a program."""
