"""Figures and tables of the papers as commands: the paper's number, ours, and whether ours is within the band.

Each entry is one file in the folder of its paper, with an `Entry` named ``ENTRY``. Files are found automatically: there
is no list of entries to edit. Files that begin with an underscore are shared by the entries of a folder.
"""

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job, Kind, Size
from fedbraid.reproduce.page import render, write_index, write_page
from fedbraid.reproduce.registry import entries, reproduce

__all__ = [
    "Entry",
    "Evidence",
    "Finding",
    "Job",
    "Kind",
    "Size",
    "entries",
    "render",
    "reproduce",
    "write_index",
    "write_page",
]
