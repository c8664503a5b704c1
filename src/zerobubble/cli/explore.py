"""`zerobubble explore`: schedules in the browser, changed while one looks at them."""

from __future__ import annotations

import json
import sys
import webbrowser

import click

from zerobubble.explorer.server import serve

OPEN_TO_OTHERS = "other machines can open this page and start searches here; leave --host out to keep it to this machine"


@click.command("explore", short_help="Try schedules in the browser.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, help="Port to listen on; 0 takes any that is free.")
@click.option(
    "--host", default="127.0.0.1", metavar="NAME", help="Address to listen on; other machines reach the page where it is not loopback."
)
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON on stdout.")
def explore(port: int, host: str, no_browser: bool, as_json: bool) -> None:
    """Open a page to try schedules: any of them, or a file, with the picture and the figures as values change.

    Choose a schedule, ranks, microbatches, times, messages, a slow link and the memory; point at passes and bubbles to see why they are
    there; save what you see in every form, with the command and the Python lines that make it anew. The address of the page holds
    all of it, to send on. The page is served by this command on this machine alone, until Ctrl-C.

    Needs the extra: pip install 'zerobubble[explore]'.

    \b
    Examples:
      zerobubble explore
      zerobubble explore --port 0 --no-browser --json
    """

    def tell(address: str, is_reached: bool) -> None:
        if is_reached:
            click.echo(f"zerobubble: {OPEN_TO_OTHERS}", err=True)
        click.echo(json.dumps({"address": address}) if as_json else f"zerobubble explore is at {address} until Ctrl-C")
        sys.stdout.flush()
        if not no_browser:
            webbrowser.open(address)

    serve(host, port, tell)
