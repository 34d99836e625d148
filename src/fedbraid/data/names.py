"""Names that a store may hold: of the set, of its fields, and of its clients.

Names of sets and fields become parts of file names, configurations and generated programs. So they are identifiers of
letters, digits and ``_``, ``-``, ``.`` only. Client ids are free text without control characters.
"""

from __future__ import annotations

import re

__all__ = ["LENGTH", "RULE", "check_client", "check_name", "safe_name"]

LENGTH, CLIENT_LENGTH = 64, 512
RULE = f"1 to {LENGTH} letters (a to z), digits, '_', '-' and '.', beginning with a letter, a digit or '_'"
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{LENGTH - 1}}}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check_name(name: object, what: str) -> str:
    """The name itself; another one than the rule allows is a ValueError that begins with ``what``.

    >>> check_name("coarse_label", "field")
    'coarse_label'
    >>> check_name("x = 1; import os", "field")
    Traceback (most recent call last):
    ValueError: field 'x = 1; import os': not a usable name; use 1 to 64 letters (a to z), digits, '_', '-' and '.', \
beginning with a letter, a digit or '_'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{what} {_shown(name)}: not a usable name; use {RULE}")
    return name


def safe_name(name: str) -> str:
    """A usable name made of any text, such as a file name or the title of a column.

    >>> safe_name("image/decoded"), safe_name("Sepal length (cm)"), safe_name("")
    ('image_decoded', 'Sepal_length_cm', 'unnamed')
    """
    made = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_")[:LENGTH].lstrip(".-")
    if name.startswith("_") and made:
        made = f"_{made}"[:LENGTH]
    return made or "unnamed"


def check_client(client: object, at: str) -> str:
    """The client id itself, if it is text without control characters that UTF-8 can hold.

    >>> check_client("THE_TRAGEDY_OF_KING_LEAR FOOL", "file")
    'THE_TRAGEDY_OF_KING_LEAR FOOL'
    """
    if not isinstance(client, str):
        raise ValueError(f"{at}: the client id {_shown(client)} is {type(client).__name__}, not text")
    if not client:
        raise ValueError(f"{at}: a client id is empty; name every client")
    try:
        client.encode().decode()  # NumPy can make strings of code points that do not exist
    except UnicodeError as error:
        raise ValueError(f"{at}: the client id {_shown(client)} is not valid Unicode") from error
    if len(client) > CLIENT_LENGTH or _CONTROL.search(client):
        raise ValueError(
            f"{at}: the client id {_shown(client)} has control characters, or more than {CLIENT_LENGTH} characters"
        )
    return client


def _shown(value: object) -> str:
    """A value in an error message: quoted, without line breaks, and short."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
