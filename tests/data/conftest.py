"""typer touches names that newer clicks deprecate, at import; import it once with that warning let through."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer  # noqa: F401
