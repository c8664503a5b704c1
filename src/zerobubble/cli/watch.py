"""`zerobubble watch`: a page of training runs, while they go on and afterwards."""

from __future__ import annotations

import json

import click

from zerobubble.cli.explore import PageCommand, announcer, server_options
from zerobubble.cli.inputs.options import json_option
from zerobubble.explorer.server import require_libraries, serve
from zerobubble.watch.figures import figures
from zerobubble.watch.run import WatchedRun

OPEN_TO_OTHERS = "other machines can open this page; leave out --host to serve this machine only"


@click.command("watch", cls=PageCommand)
@click.argument("folders", nargs=-1, required=True, metavar="RUN...")
@server_options(8766)
@json_option
def watch(folders: tuple[str, ...], port: int, host: str, no_browser: bool, as_json: bool) -> None:
    """Show training runs in the browser, while they go on and afterwards.

    \b
    Examples:
      zerobubble watch runs/a
      zerobubble watch runs/a runs/b
      zerobubble watch runs/a --json

    Each RUN is the folder of `zb.hooks.Telemetry(folder=RUN)`; several are compared. The page shows the timeline of the last recorded step
    with its plan, losses, the time and bubble of each step, the drift of stage times, which rank waits for which, and memory against its
    forecast. It is updated every second. Of a run that has ended it shows when and why. The folders are only read. --json prints the state
    of the runs once, without a server.
    """
    runs = [WatchedRun(folder) for folder in dict.fromkeys(folders)]
    if as_json:
        click.echo(json.dumps([figures(run) for run in runs], indent=2, allow_nan=False))
        return
    require_libraries("watch")
    from zerobubble.watch.app import make_watch_app

    serve(lambda names: make_watch_app(runs, names), host, port, announcer("watch", OPEN_TO_OTHERS, no_browser))
