"""The command line of all benchmarks."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from bigmodel.cli.log_filters import filter_library_logs

from .harness.errors import UsageError
from .harness.report import Report, disturbances
from .harness.show import csv_text, show
from .harness.store import result_data, save_report

FOLDER = Path(__file__).resolve().parent


class _BenchmarkParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows an option's default unless its help text does."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def questions() -> dict[str, str]:
    """Return the benchmarks: name -> the question that it answers, in one line. No module is imported."""
    found = ((path.stem.replace("_", "-"), _question(path)) for path in sorted(FOLDER.glob("*.py")))
    return {name: question for name, question in found if question is not None}


@cache
def _question(path: Path) -> str | None:
    """Return the question that a benchmark's file answers; None if it is none."""
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError:  # reported when this benchmark is run; the others still work
        return "cannot be read"
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return (ast.get_docstring(tree) or "").partition("\n")[0] if {"run", "add_arguments"} <= functions else None


def main(arguments: Sequence[str], program: str = "python -m benchmarks") -> int:
    """Run one benchmark and return the exit code: 0 done, 1 failed (or a limit missed with --check), 2 usage."""
    debug = "--debug" in arguments
    given = [text for text in arguments if text != "--debug"]
    try:
        return run(given, program)
    except UsageError as error:
        return _fail(program, error, 2, debug)
    except KeyboardInterrupt as error:
        return _fail(program, error, 130, debug)
    except Exception as error:
        return _fail(program, error, 1, debug)


def run(arguments: Sequence[str], program: str = "python -m benchmarks") -> int:
    """Run the benchmark that `arguments` name, and return the exit code.

    Raises:
        UsageError: They name no benchmark.
        Exception: An error of the benchmark.
    """
    filter_library_logs()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    known = questions()
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, known), default=0)
        print(f"usage: {program} NAME [options]\n\nbenchmarks:")
        print("\n".join(f"  {name.ljust(width)}  {question}" for name, question in known.items()))
        return 0
    name = arguments[0].replace("_", "-")
    if name not in known:
        raise UsageError(f"{arguments[0]!r} is not a benchmark; use one of {', '.join(known)}")
    module: Any = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
    parser = _parser(f"{program} {name}", known[name], module)
    options = parser.parse_args(arguments[1:])
    _check_device(parser, options.device, module)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    options.workdir.mkdir(parents=True, exist_ok=True)
    report: Report = module.run(options)
    report.notes += disturbances(report)
    if options.quick:
        report.notes.append("tiny sizes: the figures show that it runs, not how fast")
    # Saved before printing: the reader of standard output may have closed it.
    kept = options.results is not None or not options.quick
    path = save_report(report, arguments, options.results) if kept else None
    _print(report, options, arguments)
    if path is not None:
        print(f"results kept in {path}", file=sys.stderr)
    return 1 if options.check and not report.kept else 0


def _parser(program: str, question: str, module: Any) -> _BenchmarkParser:
    parser = _BenchmarkParser(prog=program, description=module.__doc__ or question, formatter_class=_Help)
    common = parser.add_argument_group("every question")
    common.add_argument("--rounds", type=_positive, default=5, help="values for each variant")
    common.add_argument("--seed", type=int, default=0, help="of the order within rounds")
    common.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, or virtual")
    common.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, not how fast")
    common.add_argument("--workdir", type=Path, default=default_workdir(), help="where checkpoints are kept")
    common.add_argument(
        "--results",
        type=Path,
        default=None,
        help="folder for the JSON file (default: benchmarks/results of a checkout, else benchmark-results here)",
    )
    common.add_argument("--threads", type=_positive, default=None, help="threads of torch (default: its own choice)")
    common.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    form = common.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")
    module.add_arguments(parser)
    return parser


def _check_device(parser: _BenchmarkParser, device: str, module: Any) -> None:
    """Refuse a device that the benchmark does not run on."""
    known = getattr(module, "DEVICES", (parser.get_default("device"),))
    if device.partition(":")[0] not in known:
        reason = getattr(module, "ONLY", "")
        parser.error(f"it does not support --device {device}, only {' or '.join(known)}{reason and ': '}{reason}")


def default_workdir() -> Path:
    """Return the folder for checkpoints, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bigmodel" / "benchmarks"


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def _print(report: Report, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    if options.json:
        print(json.dumps(result_data(report, arguments), indent=1))
    elif options.csv:
        sys.stdout.write(csv_text(report))
    else:
        show(report)


def _fail(program: str, error: BaseException, code: int, debug: bool) -> int:
    if debug:
        raise error
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code
