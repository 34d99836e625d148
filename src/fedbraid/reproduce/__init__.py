"""The papers' figures and tables as commands: the paper's number, ours, and whether ours lies in the band.

One file an entry, in a folder for its paper; each holds an `Entry` named ``ENTRY``. A file found there is an entry:
there is no list to add it to.
"""

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job, Size
from fedbraid.reproduce.page import write_index, write_page
from fedbraid.reproduce.registry import entries, reproduce

__all__ = ["Entry", "Evidence", "Finding", "Job", "Size", "entries", "reproduce", "write_index", "write_page"]
