"""typer 0.20 touches names that click 8.4 has deprecated, at import; import it once with that warning let through."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.testing  # noqa: F401
