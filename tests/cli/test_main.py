import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bigmodel import __version__
from bigmodel.cli import main as cli
from bigmodel.cli.commands import COMMANDS
from bigmodel.errors import BudgetError


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """The command changes what Ctrl-C does; here it runs within the tests' process."""
    previous = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Let `bigmodel env` raise what it is given."""

    def let(error: BaseException) -> None:
        def env() -> None:
            raise error

        monkeypatch.setattr("bigmodel.cli.env.env", env)

    return let


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"bigmodel {__version__}\n"


def test_help_says_what_each_command_does_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--help"])
    assert "no weight is read or downloaded." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("command", "verbosity"), [("env", "error"), ("launch", None)])
def test_libraries_are_silenced_for_a_command_and_not_for_a_launched_script(
    command: str, verbosity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run", lambda arguments, debug: 0)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(SystemExit):
        cli.main([command])
    assert os.environ.get("TRANSFORMERS_VERBOSITY") == verbosity


def test_a_wrong_command_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plam"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "plam" in output.err


@pytest.mark.parametrize("error", [BudgetError("it is\n  too big"), FileNotFoundError("no file here")])
def test_a_failure_is_one_line_and_exit_code_1(failing, error, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    failing(error)
    assert cli.run(["env"]) == 1
    output = capsys.readouterr()
    assert output.err == "bigmodel: " + " ".join(str(error).split()) + "\n"


def test_debug_shows_the_traceback(failing, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    failing(BudgetError("too big"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["env", "--debug"])
    assert exit_.value.code == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupting_is_exit_code_130(failing, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    failing(KeyboardInterrupt())
    assert cli.run(["env"]) == 130
    assert capsys.readouterr().err == "bigmodel: interrupted\n"


def test_a_mistake_of_ours_is_not_hidden(failing) -> None:  # type: ignore[no-untyped-def]
    failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.run(["env"])


def test_debug_after_the_script_belongs_to_the_script() -> None:
    arguments = ["launch", "train.py", "--debug"]
    assert cli._take_debug(arguments) is False
    assert arguments == ["launch", "train.py", "--debug"]


def test_a_letter_that_the_terminal_does_not_have_is_no_failure() -> None:
    code = "from bigmodel.cli import main as cli; cli.run = lambda arguments, debug: print('µ'); cli.main(['env'])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "?\n")


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    code = "import sys; from bigmodel.cli.main import run; run(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_process_that_the_kernel_ends_says_where_it_was() -> None:
    code = "import os, signal; from bigmodel.cli import main as cli; "
    code += "cli.run = lambda arguments, debug: os.kill(os.getpid(), signal.SIGBUS); cli.main(['env'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr
    assert "cli/main.py" in done.stderr
