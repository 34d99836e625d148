"""Builds the documentation site: ``make docs``.

``python -m sitebuild`` copies the Markdown files of ``docs`` into ``build/docs``, executes the tutorials, writes the
reference pages from the source of the library, and calls MkDocs, which fails on any warning. Markdown files stay
readable without it. What is special to the site is written in HTML comments (:mod:`sitebuild.blocks`).
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXECUTED = ("learn", "coming-from")  # folders whose pages are executed
LEFT_OUT = ("sitebuild", "reproductions/work")  # folders that are no part of the site
