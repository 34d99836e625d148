"""The command line. Thin: every command reads its arguments, calls the library and prints.

One module an area, each with a typer ``app`` (a group of commands) or a ``command``; heavy imports happen inside the
commands, so that ``fedbraid --help`` is instant.
"""

from fedbraid.cli.app import main

__all__ = ["main"]
