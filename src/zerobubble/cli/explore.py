"""`zerobubble explore`: an interactive page of schedules."""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Callable
from typing import Any, TypeVar

import click

from zerobubble.cli.inputs.options import json_option
from zerobubble.explorer.server import EXTRA, require_libraries, serve
from zerobubble.installing import install

OPEN_TO_OTHERS = "other machines can open this page and start searches here; leave out --host to serve this machine only"

C = TypeVar("C", bound=Callable[..., Any])


class PageCommand(click.Command):
    """A command that serves a page; its help ends with how to install what the server needs."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text(f"The page needs the extra: {install(EXTRA)}")


def server_options(port: int) -> Callable[[C], C]:
    """Returns a decorator that adds the options of a page's server, by default at `port`."""

    def decorate(command: C) -> C:
        options = (
            click.option(
                "--port", type=click.IntRange(0, 65535), default=port, metavar="N", help="Port to listen on; 0 for any free port."
            ),
            click.option(
                "--host",
                default="127.0.0.1",
                metavar="NAME",
                help="Address to listen on. Other machines can reach the page if it is not loopback.",
            ),
            click.option("--no-browser", is_flag=True, help="Print the address without opening a browser."),
        )
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def announcer(command: str, note: str, no_browser: bool, as_json: bool = False) -> Callable[[str, bool], None]:
    """Returns a function that prints the address of a page, after `note` if other machines reach it, and opens the page in a browser."""

    def announce(address: str, is_reached: bool) -> None:
        if is_reached:
            click.echo(f"zerobubble: {note}", err=True)
        click.echo(json.dumps({"address": address}) if as_json else f"zerobubble {command} is at {address} until Ctrl-C")
        sys.stdout.flush()
        if not no_browser:
            webbrowser.open(address)

    return announce


@click.command("explore", cls=PageCommand)
@server_options(8765)
@json_option
def explore(port: int, host: str, no_browser: bool, as_json: bool) -> None:
    """Open a page that shows any schedule with its picture and figures, and updates them as you change values.

    \b
    Examples:
      zerobubble explore
      zerobubble explore --port 0 --no-browser --json

    Choose a schedule, ranks, microbatches, times, messages, a slow link and the memory. Point at passes and bubbles for their causes. Save
    the result in any form, with the command and the Python code that reproduce it. The address of the page contains all values, so it can
    be shared. The command serves the page on this machine only, until Ctrl-C.
    """
    require_libraries("explore")
    from zerobubble.explorer.app import make_app

    serve(make_app, host, port, announcer("explore", OPEN_TO_OTHERS, no_browser, as_json))
