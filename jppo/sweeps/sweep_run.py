"""One run of a sweep and its file."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jppo.config.checks import check_path
from jppo.config.ppo import Hyperparams
from jppo.config.schedules import Schedule
from jppo.errors import Refused
from jppo.ppo.anakin import Anakin
from jppo.ppo.types import PolicyState
from jppo.runs.files import jsonable, open_file, short_reason, write_atomically
from jppo.runs.groups import format_value
from jppo.runs.leaves import with_dtype
from jppo.runs.policy import TrainedPolicy
from jppo.runs.run_dir import NPZ_ERRORS, BestPolicy, run_config
from jppo.runs.writer import write_run

STATUSES = FINISHED, SOLVED, DIVERGED, STOPPED, INTERRUPTED = (
    "finished",  # all updates
    "solved",  # reached stop_at_return
    "diverged",
    "stopped",  # by successive halving, or because another run of its population is solved
    "interrupted",
)
HALVED = "successive halving"  # the reason of a stop
_SUMMARY = ("status", "updates", "episodes", "return_mean", "return_std")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The result of training one run."""

    status: str  # one of STATUSES
    updates: int
    episodes: int
    return_mean: float  # over about the last hundred episodes; NaN if no episode ended
    return_std: float
    metrics: dict[str, np.ndarray]  # [updates] each
    policy_state: PolicyState  # NumPy leaves
    error: str = ""  # why the run ended, if an action_mask without legal actions ended it
    stop_reason: str = ""  # if the status is stopped
    eval_return_mean: float | None = None  # mean return of the last evaluation; None before the first one
    best: BestPolicy | None = None  # update and return of the best policy
    best_policy_state: PolicyState | None = None  # NumPy leaves
    # of population-based training: (update, number of the copied run); None without it
    copies: tuple[tuple[int, int], ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SweepRun(RunOutcome):
    """One run of a sweep."""

    number: int
    seed: int
    settings: dict[str, Any]  # values of the settings that the caller named
    hyperparams: Hyperparams
    env: str  # name of the environment
    agent: Anakin | None  # None in runs of `load_sweep`, which have no policy
    custom_parts: tuple[str, ...]  # which of environment, network, optimizer, loss and advantages are user objects
    name: str  # of its files: environment and fingerprint

    def __repr__(self) -> str:
        fields = ("number", "env", "seed", "settings", *_SUMMARY)
        return f"SweepRun({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    @property
    def env_steps(self) -> int:
        """Number of environment steps."""
        return self.updates * int(self.metrics["env_steps"][0] // self.metrics["update"][0]) if self.updates else 0

    @property
    def last_values(self) -> dict[str, float]:
        """The last values of the hyperparameters that population-based training changed."""
        values = {}
        for name, value in self.settings.items() if self.copies is not None else ():
            column = self.metrics.get(f"hyperparams/{name}")
            if column is not None and not isinstance(value, Schedule):  # schedules are metrics, too
                values[name] = float(column[-1] if len(column) else value)
        return values

    @property
    def policy(self) -> TrainedPolicy:
        """The trained policy, which acts on NumPy observations."""
        assert self.agent is not None
        return TrainedPolicy(self.agent.policy, self.policy_state, self.agent.env)

    @property
    def best_policy(self) -> TrainedPolicy | None:
        """The best policy; None without an evaluation or `stop_at_return`, or if no policy counts."""
        assert self.agent is not None
        state, env = self.best_policy_state, self.agent.env
        return None if state is None else TrainedPolicy(self.agent.policy, state, env)

    @property
    def is_complete(self) -> bool:
        """Whether successive halving has not stopped the run."""
        return (self.status, self.stop_reason) != (STOPPED, HALVED)

    @property
    def ended_early(self) -> bool:
        """Whether the run reached stop_at_return, or another one of its population did."""
        return self.status == SOLVED or (self.status == STOPPED and self.is_complete)

    @property
    def score(self) -> float:
        """return_mean, or minus infinity if the run diverged or no episode ended."""
        return -np.inf if self.status == DIVERGED or np.isnan(self.return_mean) else self.return_mean

    @property
    def row(self) -> dict[str, Any]:
        """The run's row in tables."""
        row = {"run": self.number, "env": self.env, "seed": self.seed} | self.settings
        row |= {name: getattr(self, name) for name in ("status", "updates", "env_steps", *_SUMMARY[2:])}
        row |= {f"last/{name}": value for name, value in self.last_values.items()}
        return row | ({"stop_reason": self.stop_reason} if self.stop_reason else {}) | self._events

    @property
    def _events(self) -> dict[str, Any]:
        """The results of evaluations and the best policy, as in summary.json."""
        evaluation = {} if self.eval_return_mean is None else {"eval_return_mean": self.eval_return_mean}
        return evaluation | (
            {} if self.best is None else {"best_update": self.best.update, "best_return": self.best.score}
        )

    def save(self, run_dir: str | Path) -> None:
        """Writes a run directory as `jppo.train` does, for `jppo eval`, `jppo plot` and `jppo play`.

        Raises:
          ValueError: a file cannot be written.
        """
        assert self.agent is not None
        run_dir, config = check_path("run_dir", run_dir), self.agent.config
        summary = {"env": self.env, "backend": "device", "steps": self.env_steps}
        summary |= {name: getattr(self, name) for name in _SUMMARY} | self._events
        if self.stop_reason:
            summary["stop_reason"] = self.stop_reason
        settings = run_config(
            self.env, "device", self.seed, self.agent.num_updates * config.batch_size, config, self.hyperparams
        )
        settings |= dict.fromkeys(self.custom_parts, "custom")
        write_run(run_dir, settings, self.metrics, self.policy_state, summary, self.best, self.best_policy_state)


def as_cell(value: Any) -> int | float | str:
    """Returns a setting's value as an element of a column."""
    return value if isinstance(value, int | float | str) else format_value(value)


def to_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns the rows of a table as columns. A value that a row does not have is NaN, of stop_reason ""."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, "" if name == "stop_reason" else np.nan) for row in rows] for name in names}


def write_outcome(path: Path, outcome: RunOutcome, description: dict[str, Any]) -> None:
    """Writes the result of a run as an .npz file: "about" (JSON), "metrics/NAME", and the leaves of the policies,
    "policy/NUMBER" and "best/NUMBER".

    Args:
      description: the result of `describe_run`.
    """
    names = (*_SUMMARY, "error", "copies", "stop_reason", "eval_return_mean", "best")
    about = description | {name: getattr(outcome, name) for name in names}
    arrays = {f"metrics/{name}": column for name, column in outcome.metrics.items()}
    for name, policy in (("policy", outcome.policy_state), ("best", outcome.best_policy_state)):
        arrays |= {f"{name}/{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(policy))}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, about=json.dumps(jsonable(about)), **arrays)
    write_atomically(path, file.getvalue())


def read_outcome(path: Path, agent: Anakin | None) -> tuple[RunOutcome, dict[str, Any]]:
    """Reads a file of `write_outcome`. Raises ValueError if the file is damaged.

    Args:
      agent: the agent of the run; None leaves the policy out.

    Returns:
      the result of the run, and its description.
    """
    try:
        with open_file(path) as opened, np.load(opened, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            metrics = {name.removeprefix("metrics/"): file[name] for name in file.files if name.startswith("metrics/")}
            _check_types(about, metrics)
            best = None
            if about.get("best") is not None:
                update, score, measure = about["best"]
                best = BestPolicy(int(update), float(score), str(measure))
            like = (
                None
                if agent is None
                else jax.eval_shape(agent.init, jax.random.key(0), Hyperparams()).train.policy_state
            )
            policy_state = _read_policy(file, "policy", like)
            best_policy_state = None if best is None else _read_policy(file, "best", like)
        summary: dict[str, Any] = {name: np.nan if about[name] is None else about[name] for name in _SUMMARY}
        summary |= {"error": about.get("error", ""), "stop_reason": about.get("stop_reason", ""), "best": best}
        summary["eval_return_mean"], copies = about.get("eval_return_mean"), about.get("copies")
        summary["copies"] = None if copies is None else tuple((int(update), int(run)) for update, run in copies)
        return RunOutcome(
            **summary, metrics=metrics, policy_state=policy_state, best_policy_state=best_policy_state
        ), about
    except NPZ_ERRORS as error:
        raise Refused(f"{path} is damaged ({short_reason(error)}); delete it to train this run again") from None


def _check_types(about: dict[str, Any], metrics: dict[str, np.ndarray]) -> None:
    """Raises ValueError if the description of a run or its metrics have other types than those that jppo writes."""
    number = int | float | None
    kinds: dict[str, Any] = {"env": str, "seed": int, "config": dict, "hyperparams": dict, "updates": int}
    kinds |= {"episodes": int, "return_mean": number, "return_std": number, "eval_return_mean": number}
    kinds |= {"status": str, "error": str, "stop_reason": str}
    for name, kind in kinds.items():
        if not isinstance(value := about.get(name, "" if kind is str else None), kind):
            raise Refused(f"{name} is {str(value)[:80]!r}")
    for name, column in metrics.items():
        if column.shape != (about["updates"],) or column.dtype.kind not in "iuf":
            raise Refused(f"{name} is {column.dtype}{list(column.shape)}")
    if about["updates"] and not {"env_steps", "update", "episode/count", "episode/return_mean"} <= metrics.keys():
        raise Refused("metrics are missing")


def _read_policy(file: Any, name: str, like: PolicyState | None) -> Any:
    """Returns a policy in an .npz file; None if `like` is None. Raises ValueError if it has other shapes."""
    if like is None:
        return None
    shapes = jax.tree.leaves(like)
    leaves = [file[f"{name}/{i}"] for i in range(sum(key.startswith(f"{name}/") for key in file.files))]
    if len(leaves) == len(shapes):
        leaves = [with_dtype(leaf, shape.dtype) for leaf, shape in zip(leaves, shapes, strict=True)]
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in shapes]:
        raise Refused("the policy has other shapes")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
