"""An executed notebook as Markdown: cells, and what they printed and drew."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any


def notebook_page(notebook: Path, pictures: Path, link: str) -> str:
    """The page; pictures are written to the folder ``pictures``, which the page sees as ``link``."""
    parts = []
    cells = json.loads(notebook.read_text())["cells"]
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for at, output in enumerate(cell["outputs"]):
            parts.append(_output(output, pictures / f"{notebook.stem}-{number}-{at}.png", link))
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any], picture: Path, link: str) -> str:
    if output["output_type"] == "stream":
        return f'```text title="Output"\n{"".join(output["text"]).rstrip()}\n```'
    data = output.get("data", {})
    if "image/png" in data:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        return f"![Picture of the cell above]({link}/{picture.name})"
    if "text/html" in data:
        html = re.sub(r"\n\s*", "\n", "".join(data["text/html"]))
        return f'<div class="notebook-output">\n{html}\n</div>'
    return f'```text title="Output"\n{"".join(data.get("text/plain", "")).rstrip()}\n```'
