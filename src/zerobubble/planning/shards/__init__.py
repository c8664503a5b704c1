"""Plans with sharded weights: the gathers of a schedule, and schedules that need few."""
