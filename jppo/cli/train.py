"""`jppo train`."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Self

from jppo.cli.arguments import EXIT_CODES, EXIT_FAILED, PreParse, RunArguments
from jppo.cli.output import print_json
from jppo.config.checks import names_module
from jppo.config.run import SAVED_FIELDS, RunConfig
from jppo.config.terminal import wrap
from jppo.errors import Refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(RunArguments):
    """Train PPO on an environment.

    JAX environments (gymnax) run on the device, Gymnasium ones in Ray actors.

    Hyperparameters may change during the run: --ent-coef 0.01:0, docs/schedules.md.
    """

    total_steps: int = 1_000_000
    """Number of environment steps, rounded up to whole updates."""
    run_dir: Path | None = None
    """Directory of the run (default: runs/<env>/<time>-<seed>). If it contains a run, that run is resumed with its own settings."""  # noqa: E501
    resume: Path | None = None
    """Directory of a run to resume. Like --run-dir, but the run must exist. ENV may be left out, unless it is a module:name."""  # noqa: E501
    checkpoint_seconds: float = RunConfig.checkpoint_seconds
    """Seconds between two checkpoints. The end of a run always writes one."""
    max_checkpoints: int = RunConfig.max_checkpoints
    """Number of most recent checkpoints to keep."""
    quiet: bool = False
    """Show no progress and no summary."""
    json: bool = False
    """Print the summary as one line of JSON on standard output, and everything else on standard error."""
    log_every: int | None = RunConfig.log_every
    """Number of updates whose means form one line of metrics.jsonl. Default: 1."""
    eval_every: int | None = RunConfig.eval_every
    """Number of updates between two evaluations of the policy on whole episodes (metrics eval/*). Default: none."""
    eval_episodes: int | None = RunConfig.eval_episodes
    """Number of episodes of an evaluation. Default: 16."""
    eval_sampled: bool = False
    """Evaluations sample actions instead of taking the most likely ones."""
    stop_at_return: float | None = RunConfig.stop_at_return
    """End the run when the mean return reaches this value: of an evaluation if --eval-every is set, otherwise of about the last 100 episodes."""  # noqa: E501
    video: bool = False
    """Write an episode of the final policy to video.gif in the run directory."""
    force: bool = False
    """Start the run even if it needs more memory than is free."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install 'jppo[wandb]')."""
    deterministic: bool = False
    """The same seed gives the same policy, bit for bit. Slower on GPUs. A failed actor ends the run."""

    @classmethod
    def with_defaults(cls, pre_parsed: PreParse) -> "Train":
        """Returns the command with the default values of the preset, or of the run that is resumed.

        Raises ValueError if the directory of --resume contains no run.
        """
        command = dataclasses.replace(
            super().with_defaults(pre_parsed), total_steps=pre_parsed.chosen_preset.total_steps
        )
        must_exist = pre_parsed.resumes and not {"-h", "--help"} & {*pre_parsed.words}
        if pre_parsed.run_dir is None or not (must_exist or os.path.exists(pre_parsed.run_dir / "config.json")):
            return command
        return command._with_previous_run(pre_parsed.run_dir, pre_parsed.preset)

    def adjusted(self, pre_parsed: PreParse) -> Self:
        """Also leaves out --eval-sampled of a previous run if --eval-every 0 ends its evaluations."""
        command = super().adjusted(pre_parsed)
        is_set = {"--eval-sampled", "--eval_sampled"} & {*pre_parsed.words}
        return command if command.eval_every or is_set else dataclasses.replace(command, eval_sampled=False)

    def _with_previous_run(self, run_dir: Path, preset: str) -> "Train":
        """Returns the command with the default values of a previous run."""
        from jppo.runs.load import needs_env
        from jppo.runs.run_dir import read_config
        from jppo.training.settings import RunSettings, fill_from_previous_run

        previous = read_config(run_dir)
        settings = RunSettings(env=None, preset=preset, run=RunConfig(run_dir=run_dir))
        settings = fill_from_previous_run(settings, previous)
        values: dict[str, Any] = {
            "env": None if needs_env(run_dir) else previous["env"],
            "config": settings.config,
            "hyperparams": settings.hyperparams,
            "total_steps": settings.total_steps,
            "seed": settings.seed,
            "backend": settings.backend,
            "ray": settings.ray,
            "deterministic": settings.run.deterministic,
            "log_every": settings.run.log_every,
            "scale_envs": settings.overrides.get("scale_envs"),
            **{name: getattr(settings.run, name) for name in SAVED_FIELDS if name != "eval_episodes"},
            "num_devices": previous.get("num_devices"),
        }
        return dataclasses.replace(self, **{name: value for name, value in values.items() if value is not None})

    def run(self) -> int:
        from jppo.errors import ActorsFailed, TrainingDiverged
        from jppo.runs.run_dir import default_run_dir
        from jppo.training.progress import make_reporter, short_path, summary_lines
        from jppo.training.train import train

        stream = sys.stderr if self.json else sys.stdout
        names = {field.name for field in dataclasses.fields(RunConfig)} & set(vars(self))
        run = {name: getattr(self, name) for name in names} | {
            "run_dir": self._choose_run_dir() or default_run_dir(self.env, self.seed),
            "resume": self.resume is not None,
            "progress": make_reporter("none" if self.quiet else "auto", self.total_steps, stream),
        }
        try:
            result = train(**self.arguments(), total_steps=self.total_steps, run=RunConfig(**run))
        except (TrainingDiverged, ActorsFailed) as error:
            print(f"jppo: {error}", file=sys.stderr)
            if error.result is None:  # it failed before the first update
                return EXIT_FAILED
            result = error.result
        summary = result.summary
        if not self.quiet:
            lines = (line for text in summary_lines(summary) for line in wrap(text))
            print(*lines, sep="\n", file=stream, flush=True)
            if result.run_dir is not None and not self.json:
                commands = self._next_commands(short_path(result.run_dir), summary, _can_play(result.agent.env))
                if commands:
                    print("next:", *(shlex.join(words) for words in commands), sep="\n  ", file=stream, flush=True)
            if self.deterministic:
                print(f"policy: SHA-256 {summary['policy_sha256']}", file=stream, flush=True)
        if self.json:
            print_json(summary)
        return EXIT_CODES.get(summary["status"], EXIT_FAILED if "failed_writes" in summary else 0)

    def _next_commands(self, run_dir: Path, summary: dict[str, Any], can_play: bool) -> list[list[str]]:
        """Returns the commands that a user is likely to run after this run; none if it diverged in its first update."""
        if not summary["updates"]:
            return []
        is_cut = summary["status"] in ("interrupted", "failed")
        resume = [["jppo", "train", self.env, "--resume", str(run_dir)]] if is_cut else []
        env = ["--env", self.env] if names_module(self.env) else []
        return [
            *resume,
            ["jppo", "eval", str(run_dir), *env],
            *([["jppo", "play", str(run_dir), *env]] if can_play else []),
            ["jppo", "plot", str(run_dir)],
        ]

    def _choose_run_dir(self) -> Path | None:
        """Returns the directory of --run-dir or --resume. Raises ValueError if they name two."""
        run_dir, resume = self.run_dir, self.resume
        if run_dir is not None and resume is not None and run_dir.resolve() != resume.resolve():
            raise Refused(f"--run-dir {run_dir} and --resume {resume} are two different runs; give only one of them")
        return resume or run_dir


def _can_play(env: Any) -> bool:
    """Returns whether `jppo play` can draw an environment; True for one on the host, which is not made to find out."""
    from jppo.envs import Environment
    from jppo.runs.render import check_drawable

    try:
        if isinstance(env, Environment):
            check_drawable(env)
    except ValueError:
        return False
    return True
