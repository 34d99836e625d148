"""``python -m sitebuild [--fast]``: build the site. ``--fast`` does not execute the tutorials."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from sitebuild import ROOT
from sitebuild.stage import stage


def main() -> int:
    start = time.perf_counter()
    config = stage(ROOT / "build" / "docs", cache=ROOT / "build" / "docs-cache", execute="--fast" not in sys.argv)
    staged = time.perf_counter()
    # Material for MkDocs prints an advertisement about MkDocs 2 unless this is set; MkDocs is pinned below 2
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]
    ended = subprocess.run(command, env=environment, check=False).returncode
    if not ended:
        print(f"the site is in {ROOT / 'site'}: open site/index.html")
        print(f"pages written and executed in {staged - start:.0f} s, rendered in {time.perf_counter() - staged:.0f} s")
    return ended


if __name__ == "__main__":
    sys.exit(main())
