"""The code blocks of a Markdown page, and a program that runs them.

    python -m tests.docs.snippets FILE      runs a list of steps kept as JSON, and replaces it by their outputs

What a page may say about the block that follows, in a comment on the line before its fence:

    <!-- not run: REASON -->           the block is left out
    <!-- output varies: REASON -->     the output shown is an example
    <!-- background: URL -->           the command goes on until the page ends; the next block waits for the URL
    <!-- raises: NAME -->              the block ends with this exception, or the command with an exit code beside 0
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run|output varies|background|raises): (.+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and line, and what the page says about it."""

    language: str
    text: str
    line: int
    mark: str
    value: str
    span: tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One thing to run, the output that the page shows for it, and where that stands in the page."""

    kind: str
    code: str
    line: int
    mark: str
    value: str
    shown: str | None
    span: tuple[int, int]


def blocks(page: str) -> list[Block]:
    """Return all fenced blocks of a page."""
    found = []
    for fence in FENCE.finditer(page):
        mark = MARK.search(page, 0, fence.start())
        line = page.count("\n", 0, fence.start()) + 1
        kind, value = (mark[1], mark[2]) if mark else ("", "")
        found.append(Block(fence[2], fence[3], line, kind, value, fence.span(3)))
    return found


def steps(page: str) -> list[Step]:
    """Return what a page runs, in its order."""
    found: list[Step] = []
    before: Block | None = None
    for block in blocks(page):
        if block.language == "python" and block.mark != "not run":
            found.append(Step("python", block.text, block.line, block.mark, block.value, None, (0, 0)))
        elif block.language == "console" and block.mark != "not run":
            found += _commands(block)
        elif block.language == "text" and before is not None and _is_output(page, before, block):
            shown = None if block.mark == "output varies" else block.text
            found[-1] = replace(found[-1], shown=shown, span=block.span)
        before = block
    return found


def _is_output(page: str, before: Block, block: Block) -> bool:
    near = page[before.span[1] : block.span[0]].count("\n") <= 4
    return near and before.language == "python" and before.mark != "not run"


def _commands(block: Block) -> list[Step]:
    found = []
    for match in re.finditer(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        start = block.span[0]
        span = (start + match.start(2), start + match.end(2))
        varies = block.mark in ("output varies", "background")
        shown = None if varies or not match[2] else match[2]
        found.append(Step("console", match[1], block.line, block.mark, block.value, shown, span))
    return found


def run(todo: list[dict[str, str]]) -> list[str]:
    """Run steps one after another, Python blocks in one namespace, and return what each printed."""
    names: dict[str, Any] = {"__name__": "__page__"}
    background: list[subprocess.Popen[bytes]] = []
    try:
        return [_run(step, names, background) for step in todo]
    finally:
        for process in background:
            process.terminate()
            process.wait(60)


def _run(step: dict[str, str], names: dict[str, Any], background: list[subprocess.Popen[bytes]]) -> str:
    if step["kind"] == "python":
        return _run_python(step, names)
    if step["mark"] == "background":
        background.append(subprocess.Popen(["bash", "-c", f"exec {step['code']}"], stdout=sys.stderr))
        _wait_for(step["value"], background[-1])
        return ""
    done = subprocess.run(["bash", "-c", step["code"]], capture_output=True, text=True, check=False)
    if bool(done.returncode) != (step["mark"] == "raises"):
        raise RuntimeError(f"line {step['line']}: {step['code']} exits with {done.returncode}:\n{done.stderr}")
    return done.stdout + (done.stderr if done.returncode else "")


def _run_python(step: dict[str, str], names: dict[str, Any]) -> str:
    printed = io.StringIO()
    code = compile("\n" * int(step["line"]) + step["code"], "page", "exec")
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, names)
        except Exception as error:
            if type(error).__name__ != step["value"]:
                raise
            print(f"{type(error).__name__}: {error}")
        else:
            if step["mark"] == "raises":
                raise RuntimeError(f"line {step['line']}: no {step['value']} is raised")
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.URLError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"{url} is not answered")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps(run(json.loads(file.read_text()))))
