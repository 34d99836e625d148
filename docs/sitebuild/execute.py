"""Executes the blocks of a page, and writes what they print and draw below them.

All blocks of a page share a folder and, for Python, the names. A block with ``title="FILE"`` is first written to that
file. ``fedbraid`` commands run in this process, which saves the start of Python; other commands run in a shell.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sitebuild import DOCS, ROOT
from sitebuild.blocks import PICTURE, Block, blocks_of, commands_of

WIDTH = "100"  # columns of what commands print
SHOWN = 6_000  # characters of an output


class PageError(Exception):
    """A block that failed, with its page and line."""


class Done(NamedTuple):
    """A block, what it printed, and the pictures that it left open."""

    block: Block
    printed: str
    pictures: tuple[Path, ...]


def run_page(page: Path, folder: Path, *, building: bool, smaller: Mapping[str, str] = {}) -> list[Done]:
    """Run the blocks of a page in ``folder``. ``smaller``: texts to replace, for tests that need fewer rounds."""
    text = page.read_text()
    for large, small in smaller.items():
        if large not in text:
            raise PageError(f"{page}: there is no {large!r} to replace")
        text = text.replace(large, small)
    names: dict[str, Any] = {"__name__": "page"}
    done = []
    folder.mkdir(parents=True, exist_ok=True)
    with _inside(folder), _rehearsals_ended():
        for block in blocks_of(text):
            if block.title:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.code)
            if block.when == "not run" or (block.when == "build only" and not building):
                continue
            try:
                done.append(_run(block, names, folder))
            except (Exception, SystemExit) as error:
                raise PageError(f"{page}:{block.line}: {type(error).__name__}: {error}") from error
    return done


def _run(block: Block, names: dict[str, Any], folder: Path) -> Done:
    printed, pictures = "", ()
    if block.language == "python":
        printed = _python(block, names)
        pictures = _figures(folder, block.line)
    elif block.language == "sh":
        printed = "".join(_command(words) for words in commands_of(block.code))
    return Done(block, _tidy(printed, folder), pictures)


def _python(block: Block, names: dict[str, Any]) -> str:
    """Run the code; the value of a last expression is printed, as in a notebook."""
    tree = ast.parse(block.code)
    last = tree.body[-1] if tree.body else None
    shown = tree.body.pop() if isinstance(last, ast.Expr) and not block.code.rstrip().endswith(";") else None
    where = block.title or f"line {block.line}"
    with _captured() as out:
        exec(compile(tree, where, "exec"), names)
        if isinstance(shown, ast.Expr):
            value = eval(compile(ast.Expression(shown.value), where, "eval"), names)
            if value is not None and not _drawn(value):
                print(value)
    return out.getvalue()


def _drawn(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return type(first).__module__.startswith("matplotlib")


def _figures(folder: Path, line: int) -> tuple[Path, ...]:
    """Save and close the figures that matplotlib has open."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return ()
    saved = []
    for number in plt.get_fignums():
        saved.append(folder / f"figure-{line}-{number}.png")
        plt.figure(number).savefig(saved[-1], dpi=110)
    plt.close("all")
    return tuple(saved)


def _command(words: list[str]) -> str:
    if words[0] != "fedbraid" or words[1:2] == ["deploy"]:  # `deploy` starts and ends processes
        if words[0] == "fedbraid":
            words = [sys.executable, "-m", "fedbraid", *words[1:]]
        wide = {**os.environ, "COLUMNS": "300"}  # the paths of the build, which are cut out later, are long
        ran = subprocess.run(words, env=wide, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if ran.returncode:
            raise PageError(f"{' '.join(words)} ended with {ran.returncode}: {ran.stdout}")
        return ran.stdout
    from fedbraid.cli.app import make_app

    with _captured() as out:
        try:
            make_app()(words[1:], prog_name="fedbraid")
        except SystemExit as ended:
            if ended.code:
                raise PageError(f"{' '.join(words)} ended with {ended.code}: {out.getvalue()}") from None
    return out.getvalue()


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        yield out


@contextlib.contextmanager
def _rehearsals_ended() -> Iterator[None]:
    """End the processes of a rehearsal that a failed page has left."""
    try:
        yield
    except BaseException:
        for app in Path().glob("*/.rehearsal"):
            subprocess.run([sys.executable, "-m", "fedbraid", "deploy", "down", str(app.parent)], check=False)
        raise


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    os.environ["MPLBACKEND"] = "agg"
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns


def _tidy(printed: str, folder: Path) -> str:
    """Without colours, progress bars that were overwritten, trailing blanks, and the folder of the build."""
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)
    lines = [line.split("\r")[-1].rstrip() for line in printed.splitlines()]
    lines = [line for line in lines if "━" not in line]
    return "\n".join(lines).replace(f"{folder}/", "").strip("\n")[:SHOWN]


def run_pages(pages: list[Path], cache: Path, *, workers: int = 2) -> None:
    """Run the pages whose results are not in the cache, each in a process of its own."""
    todo = [page for page in pages if not (_kept(page, cache) / "done.json").is_file()]
    todo.sort(key=lambda page: "deploy up" not in page.read_text())  # the longest first
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for line in pool.map(_in_a_process, todo, [_kept(page, cache) for page in todo]):
            print(line, flush=True)


def _in_a_process(page: Path, kept: Path) -> str:
    words = [sys.executable, "-m", "sitebuild.execute", str(page), str(kept)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DOCS), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise PageError(ran.stderr)
    return f"executed {page.relative_to(ROOT)}"


def _run_and_keep(page: Path, kept: Path) -> None:
    import fedbraid

    fedbraid.use_cores()
    shutil.rmtree(kept, ignore_errors=True)
    done = run_page(page, kept, building=True)
    found = [[d.block.end, d.printed, [p.name for p in d.pictures]] for d in done]
    (kept / "done.json").write_text(json.dumps(found))


def _kept(page: Path, cache: Path) -> Path:
    """The folder of a page's results: by the text of the page and the source of the library."""
    return cache / f"{page.stem}-{hashlib.sha256(page.read_bytes() + _source()).hexdigest()[:24]}"


def executed(page: Path, *, cache: Path, pictures: Path, link: str) -> str:
    """The text of a page that `run_pages` ran, with outputs and pictures.

    pictures: the folder to which pictures are copied; ``link``: that folder as the page sees it.
    """
    kept = _kept(page, cache)
    return _with_outputs(page, kept, json.loads((kept / "done.json").read_text()), pictures, link)


def _with_outputs(page: Path, kept: Path, outputs: list[list[Any]], pictures: Path, link: str) -> str:
    text = page.read_text()
    pictures.mkdir(parents=True, exist_ok=True)

    def shown(name: str, what: str) -> str:
        copy = pictures / f"{page.stem}-{name.replace('/', '-')}"
        shutil.copyfile(kept / name, copy)
        return f"![{what}]({link}/{copy.name})"

    for end, printed, drawn in reversed(outputs):
        added = f'\n\n```text title="Output"\n{printed}\n```\n' if printed else ""
        for name in drawn:
            added += "\n\n" + shown(name, f"Picture drawn by the code above, {page.stem}") + "\n"
        text = text[:end] + added + text[end:]
    return PICTURE.sub(lambda found: shown(found["file"], found["what"]), text)


@functools.cache
def _source() -> bytes:
    """A digest of the source of the library and of this module."""
    digest = hashlib.sha256()
    for file in sorted([*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.digest()


def pages_to_execute(docs: Path, folders: tuple[str, ...]) -> list[Path]:
    """The pages of these folders that have something to run."""
    pages = [page for folder in folders for page in sorted((docs / folder).glob("*.md"))]
    return [page for page in pages if any(map(_runs, blocks_of(page.read_text())))]


def _runs(block: Block) -> bool:
    return block.language in ("python", "sh") and block.when != "not run"


if __name__ == "__main__":
    _run_and_keep(Path(sys.argv[1]), Path(sys.argv[2]))
