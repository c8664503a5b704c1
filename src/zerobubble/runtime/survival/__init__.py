"""Continues training without ranks that are gone: `survivors` reconnect, repeat a call and measure how much longer steps take, and
`lending` gives them the whole batch."""
