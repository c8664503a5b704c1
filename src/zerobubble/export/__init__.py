"""What other tools read: pictures and files made from schedules and timelines. One format per module."""
