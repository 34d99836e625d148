"""Fenced blocks of a Markdown page, and the comments that say what happens to them.

A comment on the line before a block:

``<!-- not run: REASON -->``     the block is only parsed
``<!-- build only: REASON -->``  the block runs when the site is built, and is only parsed by the tests

A comment on a line of its own:

``<!-- picture: FILE | WHAT -->``  the site shows a picture that the blocks above have made
``<!-- site: TEXT -->``            text that only the site has, such as links to generated pages
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
DIRECTIVE = re.compile(r"<!-- (?P<kind>not run|build only): (?P<reason>[^\n]+?) -->\n *$")
PICTURE = re.compile(r"^<!-- picture: (?P<file>\S+) \| (?P<what>.+?) -->$", re.M)
SITE = re.compile(r"<!-- site: (?P<text>.*?) -->", re.S)
TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    """One fenced block. ``title``: the file that it is; ``when``: "always", "build only" or "not run"."""

    language: str
    code: str
    title: str
    when: str
    reason: str
    line: int
    start: int
    end: int


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order.

    >>> [block] = blocks_of('<!-- not run: long -->\\n```sh\\nfedbraid run\\n```\\n')
    >>> block.language, block.code, block.when, block.reason
    ('sh', 'fedbraid run\\n', 'not run', 'long')
    """
    for found in FENCE.finditer(text):
        language, _, rest = found["info"].strip().partition(" ")
        before = DIRECTIVE.search(text[: found.start()])
        title = TITLE.search(rest)
        yield Block(
            language=language,
            code=textwrap.dedent(found["code"]),
            title=title[1] if title else "",
            when=before["kind"] if before else "always",
            reason=before["reason"] if before else "",
            line=text.count("\n", 0, found.start()) + 1,
            start=found.start(),
            end=found.end(),
        )


def commands_of(code: str) -> Iterator[list[str]]:
    """The commands of a block of shell, each as its words; variables before a command are left out.

    >>> list(commands_of("A=1 fedbraid run \\\\\\n  --out x   # a comment\\nfedbraid cost && fedbraid list models"))
    [['fedbraid', 'run', '--out', 'x'], ['fedbraid', 'cost'], ['fedbraid', 'list', 'models']]
    """
    for line in code.replace("\\\n", " ").splitlines():
        line = line.removeprefix("$ ")
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("&&", ";", "|", "||", ">", "<", "&"):
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
                words.append(word)
