"""Going on without ranks that are gone: `survivors` meet again and make a call again, `lending` gives them the whole batch,
`step_times` tells how much longer steps take."""
