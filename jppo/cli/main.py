"""The entry point of `jppo`: selects the command, runs it and turns errors into exit codes. Imports no JAX."""

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import traceback
import warnings
from typing import Any, Literal

import tyro

from jppo import __version__
from jppo.cli.arguments import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    REGISTRY,
    pre_parse,
)
from jppo.cli.bench import Bench
from jppo.cli.check_env import CheckEnv
from jppo.cli.compare import Compare
from jppo.cli.doctor import Doctor
from jppo.cli.envs import Envs
from jppo.cli.eval import Eval
from jppo.cli.export import Export
from jppo.cli.interrupt import exit_at_once
from jppo.cli.play import Play
from jppo.cli.plot import Plot
from jppo.cli.runs import Runs
from jppo.cli.sweep import Sweep
from jppo.cli.train import Train
from jppo.config.checks import did_you_mean, escape_controls, names_module
from jppo.config.ppo import DEFAULT_STRATA
from jppo.config.ray import num_cores
from jppo.config.terminal import OutputStream
from jppo.config.words import explain
from jppo.errors import Refused, strip_colours


@dataclasses.dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options in a shell.

    Bash, in ~/.bashrc: eval "$(jppo completion bash)"

    Zsh, once, with a folder of $fpath: jppo completion zsh > ~/.zfunc/_jppo

    Fish, once: jppo completion fish > ~/.config/fish/completions/jppo.fish

    Make the folder of zsh or fish first, with mkdir -p.
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Name of the shell."""

    def run(self) -> int:
        words = ["--tyro-print-completion", self.shell]
        with contextlib.suppress(SystemExit):  # tyro prints the script and exits
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog="jppo", args=words, config=(tyro.conf.OmitArgPrefixes,), registry=REGISTRY
            )
        return 0


COMMANDS: dict[str, Any] = {
    "train": Train,
    "sweep": Sweep,
    "bench": Bench,
    "check-env": CheckEnv,
    "eval": Eval,
    "runs": Runs,
    "compare": Compare,
    "plot": Plot,
    "play": Play,
    "export": Export,
    "envs": Envs,
    "doctor": Doctor,
    "completion": Completion,
}
_USAGE = "usage: jppo [-h] [--version] COMMAND ..."
_HOST_DEVICES = "xla_force_host_platform_device_count"


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit code.

    Returns:
      0: success. 1: the run diverged, or a check failed. 2: invalid arguments. 3: actors failed, or results could not
      be written. 130: interrupted.
    """
    if owns_process := argv is None:
        signal.signal(signal.SIGINT, exit_at_once)
        warnings.showwarning, sys.excepthook = _show_warning, _show_exception
        argv = sys.argv[1:]
    output, errors = OutputStream(sys.stdout), OutputStream(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = _call(argv, owns_process)
        finally:
            output.flush()
        shows_progress = argv[:1] in (["train"], ["sweep"]) and "--json" not in argv
        if code or shows_progress or output.error is None or isinstance(output.error, BrokenPipeError):
            return code
        reason = getattr(output.error, "strerror", None) or output.error
        print(f"jppo: the output cannot be written: {reason}", file=sys.stderr)
        return EXIT_FAILED


def _call(argv: list[str], owns_process: bool) -> int:
    """Parses the arguments, runs the command and turns errors into exit codes."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(
            _help_text() if argv else f"{_USAGE}\n`jppo --help` lists the commands", file=None if argv else sys.stderr
        )
        return 0 if argv else EXIT_USAGE
    if argv[0] == "--version":
        print(f"jppo {__version__}")
        return 0
    try:
        command = parse_command(argv)
        if owns_process:
            _add_current_directory(command)
            configure_jax(command)
            if isinstance(command, Train):
                _import_training()
        return _run(command)
    except (ValueError, RuntimeError, AssertionError) as error:
        if (mistake := _find_mistake(error)) is None:
            raise
        print(f"jppo: {escape_controls(mistake)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("jppo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(command: Any) -> int:
    """Runs a command and returns its exit code. sys.exit, for example in an environment, is an error."""
    try:
        code: int = command.run()
    except SystemExit as error:
        print(f"jppo: sys.exit({error.code!r}) ended the command; the environment may call it", file=sys.stderr)
        return EXIT_FAILED
    except RuntimeError as error:
        if not isinstance(error.__cause__, SystemExit):
            raise
        print(f"jppo: {escape_controls(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning in one line. Python's own function adds the source line that raised it."""
    text = strip_colours(str(message))  # Gymnasium's warnings have colours
    print(f"jppo: warning: {escape_controls(' '.join(text.split()))}", file=sys.stderr)


def _show_exception(*error: Any) -> None:
    """Prints a traceback without the control characters of the message, which could change the terminal."""
    print(escape_controls("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


def parse_command(argv: list[str]) -> Any:
    """Returns the command with its options.

    Raises:
      Refused: the command is unknown, or an argument is wrong.
      SystemExit: --help, or an argument is unknown, missing or wrong; tyro has printed which.
    """
    name, words = argv[0], argv[1:]
    if name.startswith("-"):
        raise Refused(f"the command must come before the option {name}; `jppo --help` lists the commands")
    if name not in COMMANDS:
        raise Refused(f"unknown command {name!r}; {did_you_mean(name, COMMANDS)}")
    command, pre_parsed, options = COMMANDS[name], pre_parse(words), dict[str, Any]()
    if hasattr(command, "with_defaults"):
        options["default"] = command.with_defaults(pre_parsed)
    try:
        parsed = tyro.cli(
            command, prog=f"jppo {name}", args=words, config=(tyro.conf.OmitArgPrefixes,), registry=REGISTRY, **options
        )
    except SystemExit as end:
        for word in words if end.code else ():
            option = word.partition("=")[0]
            if option.startswith("--") and (hint := explain(option[2:].replace("-", "_"))):
                print(f"jppo: {option}: {hint}", file=sys.stderr)
        raise
    return parsed.adjusted(pre_parsed) if hasattr(parsed, "adjusted") else parsed


def _help_text() -> str:
    rows = [f"  {name:<11}{command.__doc__.splitlines()[0].rstrip('.')}" for name, command in COMMANDS.items()]
    title = "PPO in JAX: on the device, or with Ray actors."
    end = "`jppo COMMAND --help` lists the options of a command."
    return "\n".join([_USAGE, "", title, "", "commands:", *rows, "", end])


def _find_mistake(error: Exception) -> str | None:
    """Returns the user's mistake; None for an error of jppo, an environment or a library, which needs its traceback."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
        return f"JAX_PLATFORMS={platforms} names a platform that JAX does not have here; unset it, or see `jppo doctor`"
    return str(error) if isinstance(error, Refused) else None


def configure_jax(command: Any) -> None:
    """Sets the environment variables that JAX reads when it starts.

    On CPU, JAX gets one device per core, or --num-devices devices. --deterministic makes GPU kernels deterministic.
    """
    count, flags = getattr(command, "num_devices", 1) or num_cores(), os.environ.get("XLA_FLAGS", "")
    num_strata = command.config.num_strata if hasattr(command, "config") else 1
    is_file = flags and not flags.lstrip().startswith("-")  # XLA reads the flags from a file
    if count > 1 and not is_file and _HOST_DEVICES not in flags:
        limit = max(DEFAULT_STRATA, num_strata)
        os.environ["XLA_FLAGS"] = f"{flags} --{_HOST_DEVICES}={min(count, limit)}".strip()
    if getattr(command, "deterministic", False):
        from jppo.devices.determinism import ask_for_determinism

        ask_for_determinism()


def _add_current_directory(command: Any) -> None:
    """Makes modules of the current directory importable if an argument is module:name.

    The directory is last on the path, so that its files do not hide installed packages. PYTHONSAFEPATH excludes it.
    """
    names = (getattr(command, "env", None), *getattr(command, "envs", ()))
    if any(map(names_module, names)) and not sys.flags.safe_path:
        sys.path.append(os.getcwd())


def _import_training() -> None:
    """Imports the training modules and excludes them from garbage collection, which shortens the start by a tenth."""
    import jppo.training.train  # noqa: F401

    gc.freeze()
