"""The inputs of commands: options, files, schedules with their costs, and problems to plan."""
