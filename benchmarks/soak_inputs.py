"""Damages the files of runs, and trains with random settings: nothing may end in a traceback or a wrong result.

    python benchmarks/soak_inputs.py damage --count 180
    python benchmarks/soak_inputs.py configs --count 150

damage: copies the run directory of an interrupted run, damages one file of it, and then loads its policy, evaluates it,
plots it and resumes it. Each must give the result of the intact run, or one line of error. configs: trains two updates
with random settings. A run must be finite, or be refused with one line before it starts, or be reported as diverged.
"""

import collections
import contextlib
import dataclasses
import datetime
import io
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from throughput import RESULTS, hardware

import jppo
from jppo.cli.main import main as jppo_command
from jppo.devices.determinism import fingerprint
from jppo.runs.checkpoints import FOLDER, read_checkpoint
from jppo.runs.files import write_json
from jppo.runs.load import load_run
from jppo.training import device_loop

CONFIG = jppo.PPOConfig(num_envs=4, num_steps=8, num_minibatches=2, num_epochs=1, hidden_sizes=(8,), normalize_obs=True)
HYPERPARAMS = jppo.Hyperparams(learning_rate=1e-3)
UPDATES, INTERRUPTED_AT = 24, 16
FILES = ("config.json", "metrics.jsonl", "summary.json", "policy_state.npz", FOLDER, FOLDER, FOLDER)
ENVS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "Catch-bsuite", "DeepSea-bsuite")


class Interrupting(jppo.NullReporter):
    """Sends Ctrl-C after a number of updates."""

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        if env_steps == INTERRUPTED_AT * CONFIG.batch_size:
            os.kill(os.getpid(), signal.SIGINT)


def train(run_dir: Path, progress: str | jppo.Reporter = "none") -> jppo.Result:
    """Trains or resumes the run whose files are damaged."""
    run = jppo.RunConfig(checkpoint_seconds=0.0, max_checkpoints=3)
    steps = UPDATES * CONFIG.batch_size
    given: dict[str, Any] = {"config": CONFIG, "hyperparams": HYPERPARAMS, "total_steps": steps, "seed": 0}
    return jppo.train("CartPole-v1", num_devices=1, run_dir=run_dir, run=run, progress=progress, **given)


def damage_file(path: Path, rng: random.Random) -> str:
    """Damages a file in a random way and returns a description."""
    content = path.read_bytes()
    kind = rng.choice(("truncate", "flip a bit", "flip 64 bytes", "delete", "replace", "empty"))
    changed = bytearray(content)
    if kind == "flip a bit" and content:
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "flip 64 bytes" and content:
        start = rng.randrange(len(content))
        changed[start : start + 64] = bytes(255 - byte for byte in content[start : start + 64])
    elif kind == "truncate":
        del changed[rng.randrange(len(content) + 1) :]
    elif kind == "replace":
        changed = bytearray(rng.randbytes(rng.choice((10, 1000, 100_000))))
    elif kind == "empty":
        changed.clear()
    path.write_bytes(changed)
    if kind == "delete":
        path.unlink()
    return kind


def run_command(*words: str) -> str:
    """Runs a command of jppo in this process. Returns "correct" or "error", or the text of a defect."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = jppo_command(list(words))
    text = err.getvalue()
    if "Traceback" in text or "Exception ignored" in text:
        return f"traceback: {text[-500:]}"
    if code == 0:
        return "correct"
    return "error" if code == 2 and text.startswith("jppo: ") and text.count("\n") == 1 else f"exit code {code}: {text}"


def attempt(action: Callable[[], bool]) -> str:
    """Returns "correct", "wrong result" or "error", or the text of a defect."""
    try:
        return "correct" if action() else "wrong result"
    except (ValueError, jppo.TrainingDiverged) as error:
        is_clear = "\n" not in str(error).strip() and "/jppo/" in traceback.extract_tb(error.__traceback__)[-1].filename
        return "error" if is_clear else f"unclear error: {traceback.format_exc()[-1500:]}"
    except Exception:
        return f"exception: {traceback.format_exc()[-1500:]}"


def try_run(path: Path, policies: set[str], final_policy: str) -> dict[str, str]:
    """Uses a damaged run in every way; resumes it last, because that repairs it."""

    def load() -> bool:
        return fingerprint(load_run(path).policy_state) in policies

    def resume() -> bool:
        return fingerprint(train(path).policy.state) == final_policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "load": attempt(load),
            "eval": run_command("eval", str(path), "--num-episodes", "2"),
            "plot": run_command("plot", str(path), "--output", str(path.parent / "curves.png")),
            "resume": attempt(resume),
        }


def damage(count: int = 180, seed: int = 0, output: Path = RESULTS / "soak_damage.json") -> None:
    """Damages run directories.

    Args:
      count: number of damaged directories.
      seed: seed of the damage.
      output: JSON file of the results.
    """
    device_loop._CHUNK_SECONDS = 0.0  # chunks of one update, so that the run has several checkpoints
    rng, start, rows = random.Random(seed), time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        final_policy = fingerprint(train(Path(folder) / "whole").policy.state)
        intact = Path(folder) / "intact"
        train(intact, Interrupting())
        run = load_run(intact)
        policies = {fingerprint(run.policy_state)}
        for path in (intact / FOLDER).iterdir():
            policies.add(fingerprint(read_checkpoint(path).restore(run.policy_state, ".train.policy_state")))
        for number in range(count):
            path = Path(folder) / f"run{number}"
            shutil.copytree(intact, path)
            target = path / rng.choice(FILES)
            if target.is_dir():
                target = rng.choice(sorted(file for file in target.rglob("*") if file.is_file()))
            row = {"file": str(target.relative_to(path)), "damage": damage_file(target, rng)}
            rows.append(row | try_run(path, policies, final_policy))
            shutil.rmtree(path)
            print(f"\r{number + 1}/{count} {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
    finish(rows, ("load", "eval", "plot", "resume"), output)


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Returns random arguments of `jppo.train`. About a third have an invalid or extreme value."""
    config: dict[str, Any] = {
        "num_envs": rng.choice((1, 2, 4, 8, 16)),
        "num_steps": rng.choice((1, 2, 4, 8, 16)),
        "num_epochs": rng.choice((1, 2, 3)),
        "num_minibatches": rng.choice((1, 1, 1, 2, 4)),
        "hidden_sizes": rng.choice(((), (1,), (8,), (8, 8))),
        "num_strata": rng.choice((1, 2, 8)),
        "recurrent_size": rng.choice((1, 8)),
        "sequence_length": rng.choice((None, None, 2)),
    }
    for name, kind in typing.get_type_hints(jppo.PPOConfig).items():
        if kind is bool:
            config[name] = rng.choice((True, False))
        elif typing.get_origin(kind) is typing.Literal and name != "network":
            config[name] = rng.choice(typing.get_args(kind))
    hyperparams: dict[str, Any] = {}
    if rng.random() < 1 / 3:
        invalid = {"num_envs": 0, "num_epochs": 0, "num_minibatches": 3, "hidden_sizes": (0,), "recurrent_size": True}
        numbers = (0.0, 1e-30, 1e-3, 0.5, 1.0, 2.0, 1e3, 1e30, -1.0, float("inf"), float("nan"))
        fields = [field.name for field in dataclasses.fields(jppo.Hyperparams)]
        if rng.random() < 1 / 3:
            name = rng.choice(sorted(invalid))
            config[name] = invalid[name]
        else:
            hyperparams = {name: rng.choice(numbers) for name in rng.sample(fields, rng.choice((1, 2)))}
    return {"env": rng.choice(ENVS), "seed": rng.choice((0, 1, 2**32 - 1)), **config, **hyperparams}


def configs(
    count: int = 150, seed: int = 0, max_seconds: float = math.inf, output: Path = RESULTS / "soak_configs.json"
) -> None:
    """Trains with random settings.

    Args:
      count: number of runs.
      seed: seed of the settings.
      max_seconds: no further run starts after this time.
      output: JSON file of the results.
    """
    rng, start, rows = random.Random(seed), time.monotonic(), list[dict[str, Any]]()
    for number in range(count):
        if time.monotonic() - start > max_seconds:
            break
        settings = random_settings(rng)
        steps = 2 * max(1, settings["num_envs"] * settings["num_steps"])

        def run(settings: dict[str, Any] = settings, steps: int = steps) -> bool:
            result = jppo.train(total_steps=steps, num_devices=1, **settings)
            leaves = jax.tree.leaves((result.policy.state, result.metrics["loss/total"], result.metrics["grad/norm"]))
            return all(np.isfinite(leaf).all() for leaf in leaves)

        rows.append({"settings": {name: str(value) for name, value in settings.items()}, "train": attempt(run)})
        print(f"\r{number + 1}/{count} {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
    finish(rows, ("train",), output)


def finish(rows: list[dict[str, Any]], actions: tuple[str, ...], output: Path) -> None:
    """Writes the results and prints the counts."""
    counts = {action: collections.Counter(row[action].split(":")[0] for row in rows) for action in actions}
    table = Table("action", "correct result", "one line of error", "defects")
    for action, counter in counts.items():
        defects = len(rows) - counter["correct"] - counter["error"]
        table.add_row(action, str(counter["correct"]), str(counter["error"]), str(defects))
    write_json(
        output,
        {"cases": len(rows), "counts": counts, "rows": rows, "date": datetime.date.today().isoformat()} | hardware(),
    )
    print(file=sys.stderr)
    Console().print(table)
    for row in rows:
        if any(row[action] not in ("correct", "error") for action in actions):
            print(row)
    if unused := [action for action, counter in counts.items() if not counter["correct"]]:
        sys.exit(f"no case of {', '.join(unused)} gave a result, so the counts show nothing")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"damage": damage, "configs": configs})
