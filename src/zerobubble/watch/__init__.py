"""`zerobubble watch`: pages of running and ended jobs, from the run folders that `zb.hooks.Telemetry` writes.

`series` keeps any number of steps in bounded memory. `rank_log` reads the log of one rank as it grows, `run` the whole folder. `figures`
derives what is shown, `page` writes it as HTML, and `app` serves it on loopback. `web/` is the page's own script; it draws with the
viewer's modules.
"""
