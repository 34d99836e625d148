"""The command line. Every command only reads its arguments, calls the library and prints.

Each module has a typer ``app`` (a group of commands) or one ``command``. Heavy imports are inside the commands, so that
``fedbraid --help`` starts quickly.
"""

from fedbraid.cli.app import main

__all__ = ["main"]
