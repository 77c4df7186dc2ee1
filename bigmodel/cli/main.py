"""The `bigmodel` command: dispatches to a subcommand and reports errors as one line and an exit code.

Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted. `--debug` shows the traceback.

Only what the interpreter has imported by itself is imported here, so that Ctrl-C is prepared for first.
"""

from __future__ import annotations

import os
import sys

from .interrupts import INTERRUPTED, end_at_once


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    end_at_once()
    import faulthandler
    import io

    from .log_filters import filter_library_logs

    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(given)
    if given[:1] not in (["launch"], ["run"]):  # a launched script keeps its own logging
        filter_library_logs()
    if not faulthandler.is_enabled():  # a truncated mapped checkpoint raises SIGBUS: show where
        faulthandler.enable(sys.__stderr__ or 2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # unencodable characters must not fail the command
        sys.stdout.reconfigure(errors="replace")
    try:
        code = run(given, debug)
    except KeyboardInterrupt:  # a second one, while the first one was handled
        code = INTERRUPTED
    finally:
        end_at_once()  # what is left is the end of the interpreter
    sys.exit(code)


def run(arguments: list[str], debug: bool = False) -> int:
    """Run the command line and return its exit code."""
    import typer

    from bigmodel.errors import BigModelError

    from .commands import ClickError, UsageError, app

    try:
        arguments = arguments or ["--help"]
        code = typer.main.get_command(app).main(arguments, prog_name="bigmodel", standalone_mode=False)
    except ClickError as error:
        return _fail(error.format_message(), 2 if isinstance(error, UsageError) else 1, debug)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of standard output has closed it; nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BigModelError, OSError, ImportError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__, 1, debug)
    # typer itself turns Ctrl-C into exit code 130.
    if code == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED, debug)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print("bigmodel: " + " ".join(message.split()), file=sys.stderr)
    return code


def _take_debug(arguments: list[str]) -> bool:
    """Remove `--debug` at any position, except from the flags of a launched script; return whether it was there."""
    end = min((arguments.index(name) for name in ("launch", "run") if name in arguments), default=len(arguments))
    found = "--debug" in arguments[:end]
    arguments[:end] = [argument for argument in arguments[:end] if argument != "--debug"]
    return found


if __name__ == "__main__":
    main()
