"""The docstrings of the library as Markdown, for mkdocstrings.

They are plain text: a sentence, paragraphs, lists of ``name: text`` with a hanging indent, and examples with ``>>>``.
"""

from __future__ import annotations

import re

ENTRY = re.compile(r"^((?:\w+|\*+\w+|``[^`]+``)(?:(?:, | and | or |/)(?:\w+|``[^`]+``))*)(?: \[([^\]]+)\])?: (?=\S)")
ROLE = re.compile(r":(?:class|func|mod|meth|attr|data|exc):`~?([^`]+)`")


def to_markdown(text: str) -> str:
    """A docstring as Markdown.

    >>> print(to_markdown("Sum.\\n\\na: the first,\\n    a number.\\nb: the other.\\n\\n>>> 1 + 1\\n2"))
    Sum.
    <BLANKLINE>
    - **`a`**: the first,
        a number.
    - **`b`**: the other.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    parts = [part for part in re.split(r"\n\s*\n", ROLE.sub(r"``\1``", text).strip("\n")) if part.strip()]
    return "\n\n".join(_paragraph(part, first=i == 0) for i, part in enumerate(parts))


def _paragraph(part: str, *, first: bool = False) -> str:
    """A paragraph. The first line of a docstring is a sentence, also if it begins with a name and a colon."""
    lines = part.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        indent = len(lines[0]) - len(lines[0].lstrip())
        return "\n".join(["```pycon", *(line[indent:] for line in lines), "```"])
    at = next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>>")), None)
    if at:  # an example directly below its sentence
        return "\n\n".join([_paragraph("\n".join(lines[:at])), _paragraph("\n".join(lines[at:]))])
    starts = [i for i, line in enumerate(lines) if ENTRY.match(line) and not (first and i == 0)]
    if starts and all(i in starts or lines[i].startswith("    ") for i in range(starts[0], len(lines))):
        head = "\n".join(map(_safe, lines[: starts[0]]))
        items = "\n".join(_item(line) if i in starts else _safe(line) for i, line in enumerate(lines) if i >= starts[0])
        return f"{head}\n\n{items}" if head else items
    if all(line.startswith("    ") for line in lines):
        return part  # formulas: a block of code
    return "\n".join(map(_safe, lines))


def _item(line: str) -> str:
    found = ENTRY.match(line)
    assert found is not None
    unit = f" ({found[2]})" if found[2] else ""
    return f"- **`{found[1].replace('``', '')}`**{unit}: {_safe(line[found.end() :])}"


def _safe(line: str) -> str:
    """Square brackets, stars and underscores outside of code are text, not links or emphasis."""
    parts = re.split(r"(`+[^`]*`+)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([\[\]*_<])", r"\\\1", part) for part in parts)


try:
    import griffe
except ImportError:  # the tests of this module need only `to_markdown`
    pass
else:

    class PlainDocstrings(griffe.Extension):
        """Changes every docstring into Markdown before mkdocstrings renders it, and adds the fields of classes."""

        def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
            if not obj.is_alias and obj.docstring:
                obj.docstring.value = to_markdown(obj.docstring.value)

        def on_class_members(self, *, cls: griffe.Class, **kwargs: object) -> None:
            fields = [
                f"{name}: {member.annotation}" + (f" = {member.value}" if member.value is not None else "")
                for name, member in cls.members.items()
                if isinstance(member, griffe.Attribute) and member.annotation and not name.startswith("_")
            ]
            if fields:
                text = "\n".join(["```python", *fields, "```"])
                before = cls.docstring.value if cls.docstring else ""
                cls.docstring = griffe.Docstring(f"{before}\n\nFields:\n\n{text}".lstrip(), parent=cls)
