"""``python -m fedbraid``."""

from fedbraid.cli import main

main()
