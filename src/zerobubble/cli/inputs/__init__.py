"""What verbs are given: options, files, schedules with their costs, and what is to be planned for."""
