"""Continues training without ranks that are gone: `survivors` reconnect and repeat a call, `lending` gives them the whole batch, and
`step_times` measures how much longer steps take."""
