"""At import, typer 0.20 uses names that click 8.4 has deprecated: import it once with that warning ignored."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.testing  # noqa: F401
