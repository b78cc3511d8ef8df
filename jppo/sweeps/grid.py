"""Expands the settings and seeds of a sweep into runs, and groups the runs by compiled program."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import math
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.config.checks import check_int, check_seed
from jppo.config.overrides import CONFIG_NAMES, HYPERPARAM_NAMES, suggest_setting
from jppo.config.pbt import HALVING, PBTConfig
from jppo.config.ppo import Hyperparams, check_hyperparams
from jppo.config.run import EVAL_EPISODES
from jppo.config.schedules import Schedule, to_json
from jppo.envs.backends import require_device
from jppo.errors import Refused
from jppo.ppo.anakin import Anakin
from jppo.runs.files import jsonable
from jppo.runs.groups import format_value
from jppo.runs.leaves import is_key
from jppo.runs.run_dir import safe_name
from jppo.training.settings import OWN_PARTS, RunSettings, prepare_run

_MAX_HALVINGS = 4
_CANDIDATES = 20  # for the best policy of a run without evaluations
_MAX_SEEDS = 100_000
_TUPLES = ("hidden_sizes", "actor_obs", "critic_obs")  # fields of which one value is a tuple


class RunSpec(NamedTuple):
    """One run of a sweep before it is trained."""

    number: int
    seed: int
    settings: dict[str, Any]  # values of the settings that the caller named
    hyperparams: Hyperparams


class ProgramGroup(NamedTuple):
    """The runs that share one compiled program: same environment, same PPOConfig, same kinds of schedules."""

    settings: RunSettings  # of each run, without seed
    agent: Anakin
    runs: tuple[RunSpec, ...]
    parts: dict[str, str]  # identity of each user object, taken before training, which may change a closure
    selection: PBTConfig | str | None = None  # None, HALVING or a PBTConfig
    max_parallel_runs: int | None = None
    num_devices: int = 1

    @property
    def env_name(self) -> str:
        """Name of the environment."""
        return self.agent.env.name

    @property
    def has_events(self) -> bool:
        """Whether something happens between updates: an evaluation or the end of a run at a return."""
        run = self.settings.run
        return bool(run.eval_every) or run.stop_at_return is not None

    @property
    def best_every(self) -> int:
        """Number of updates between two candidates for the best policy of a run without evaluations; 0: none."""
        return math.ceil(self.agent.num_updates / _CANDIDATES) if self.has_events else 0

    @property
    def rungs(self) -> list[int]:
        """Updates after which successive halving stops the worse half; the last element is the final update."""
        halvings = min(_MAX_HALVINGS, len(self.runs).bit_length() - 1) if self.selection == HALVING else 0
        return sorted({-(-self.agent.num_updates // 2**k) for k in range(halvings + 1)})

    @property
    def planned_steps(self) -> int:
        """Environment steps of all runs together."""
        runs, updates, previous = len(self.runs), 0, 0
        for rung in self.rungs:
            updates, previous, runs = updates + runs * (rung - previous), rung, math.ceil(runs / 2)
        return updates * self.agent.config.batch_size

    @property
    def name(self) -> str:
        """The environment, the swept PPOConfig fields and the kinds of swept schedules, for messages."""
        settings = self.runs[0].settings.items()
        swept = [f"{k} = {format_value(v)}" for k, v in settings if k in CONFIG_NAMES]
        kinds = [f"{k}: {v.name}" for k, v in settings if isinstance(v, Schedule)]
        return ", ".join([self.env_name, *swept, *kinds])


def make_groups(
    settings: RunSettings, *, seeds: list[int], values: dict[str, list[Any]], **options: Any
) -> list[ProgramGroup]:
    """Returns all runs of a sweep, grouped by program.

    Args:
      settings: of all runs; `env` may be a list of environments.
      seeds: the seeds of each combination of settings.
      values: the values of each setting, from `check_settings`.
      options: selection, max_parallel_runs and num_devices of each group.

    Raises:
      ValueError: an argument is invalid.
    """
    is_list = isinstance(settings.env, list | tuple) and not hasattr(settings.env, "_fields")  # of a NamedTuple
    envs = list(settings.env) if is_list else [settings.env]
    if not envs:
        raise Refused("env = [] must contain at least one environment")
    for env in envs:
        require_device(env, "sweep", "pass an environment of that kind, or use jppo.tune.trainable instead")
    groups: list[ProgramGroup] = []
    parts = {name: _represent(getattr(settings, name)) for name in OWN_PARTS}
    names, index = [], itertools.count()
    for env in envs:
        for structure in _combinations(values, CONFIG_NAMES):
            shared = dataclasses.replace(settings, env=env, overrides=structure, backend="device", num_devices=1)
            prepared: Any = prepare_run(shared)
            for alternatives in _hyperparams_by_kind(prepared.hyperparams, values):
                runs = tuple(
                    RunSpec(
                        number=next(index),
                        seed=seed,
                        settings={name: (structure | numbers)[name] for name in values},
                        hyperparams=hyperparams,
                    )
                    for numbers, hyperparams in alternatives
                    for seed in seeds
                )
                groups.append(ProgramGroup(settings=shared, agent=prepared.agent, runs=runs, parts=parts, **options))
        names.append(groups[-1].env_name)
    if len(set(names)) < len(names):
        raise Refused(f"env = {', '.join(names)} must name each environment once")
    return groups


def _hyperparams_by_kind(
    base: Hyperparams, values: dict[str, list[Any]]
) -> list[list[tuple[dict[str, Any], Hyperparams]]]:
    """Returns the swept numbers and the hyperparameters of each combination, grouped by the kinds of the schedules.

    Schedules of one kind differ only in numbers, so one program trains them together.
    """
    groups: dict[Any, list[tuple[dict[str, Any], Hyperparams]]] = {}
    for numbers in _combinations(values, HYPERPARAM_NAMES):
        hyperparams = base.replace(**numbers)
        check_hyperparams(hyperparams)
        groups.setdefault(jax.tree.structure(hyperparams), []).append((numbers, hyperparams))
    return list(groups.values())


def run_fingerprint(group: ProgramGroup, run: RunSpec) -> str:
    """Returns the name of a run's files: the environment and a hash of `describe_run`."""
    text = json.dumps(jsonable(describe_run(group, run)), sort_keys=True)
    return f"{safe_name(group.env_name)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def describe_run(group: ProgramGroup, run: RunSpec) -> dict[str, Any]:
    """Returns everything that identifies a run. User objects are represented as `_represent` does."""
    competitors, pbt = None, None
    if group.selection is not None:  # the result of a run depends on the others
        competitors = sorted(repr((other.seed, _as_json(other.hyperparams))) for other in group.runs)
    if isinstance(group.selection, PBTConfig):
        pbt = dataclasses.asdict(group.selection)
    return {
        "env": group.env_name,
        "seed": run.seed,
        "updates": group.agent.num_updates,
        "config": dataclasses.asdict(group.agent.config),
        "hyperparams": _as_json(run.hyperparams),
        "parts": {name: group.parts[name] for name in OWN_PARTS},
        "halving": group.rungs if group.selection == HALVING else None,
        "pbt": pbt,
        "competitors": competitors,
    } | _describe_events(group)


def _describe_events(group: ProgramGroup) -> dict[str, Any]:
    """Returns the settings of evaluations and of the return at which runs stop; {} without them."""
    run = group.settings.run
    fields: dict[str, Any] = {} if run.stop_at_return is None else {"stop_at_return": float(run.stop_at_return)}
    if run.eval_every:
        episodes = run.eval_episodes or EVAL_EPISODES
        fields |= {"eval_every": run.eval_every, "eval_episodes": episodes, "eval_sampled": bool(run.eval_sampled)}
        fields |= {} if run.eval_max_steps is None else {"eval_max_steps": run.eval_max_steps}
    return {"events": fields} if group.has_events else {}


def check_settings(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the list of values of each setting. Raises ValueError for unknown names and empty or repeated values."""
    names = HYPERPARAM_NAMES + CONFIG_NAMES
    values: dict[str, list[Any]] = {}
    for name, value in settings.items():
        if name not in names:
            raise Refused(f"unknown setting {name!r}{suggest_setting(name, names)}")
        if name in _TUPLES:
            several = isinstance(value, list | tuple) and 0 < len(value) == sum(
                isinstance(x, list | tuple) for x in value
            )
        else:
            several = not isinstance(value, str) and np.ndim(value) > 0
        choices = [x.item() if isinstance(x, np.generic) else x for x in (value if several else [value])]
        choices = [tuple(x) if isinstance(x, list) else x for x in choices]
        if not choices or any(x == y for x, y in itertools.combinations(choices, 2)):
            raise Refused(f"{name} = {value!r} must be one value or a list of distinct values")
        values[name] = choices
    return values


def check_seeds(seeds: Any) -> list[int]:
    """Returns the list of seeds. Raises ValueError if it is empty or contains duplicates or values that are no seed."""
    if isinstance(seeds, int | float | np.number) and not isinstance(seeds, bool):
        return list(range(check_int("seeds", seeds, 1, _MAX_SEEDS)))
    message = f"seeds = {seeds!r} must be a number of seeds or a list of distinct seeds"
    if isinstance(seeds, bool | str) or seeds is None:
        raise Refused(message)
    chosen = [check_seed(seed) for seed in seeds]
    if not chosen or len(set(chosen)) < len(chosen):
        raise Refused(message)
    return chosen


def check_num_devices(num_devices: int | None) -> int:
    """Returns the number of devices; None means all. Raises ValueError if JAX has fewer."""
    available = len(jax.local_devices())
    if num_devices is None:
        return available
    if (num_devices := check_int("num_devices", num_devices, 1)) > available:
        raise Refused(f"num_devices = {num_devices}; JAX has {available} here ({jax.devices()[0].platform})")
    return num_devices


def _combinations(values: dict[str, list[Any]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Returns all combinations of the values of those settings that `names` contains."""
    chosen = {name: choices for name, choices in values.items() if name in names}
    return (dict(zip(chosen, combination, strict=True)) for combination in itertools.product(*chosen.values()))


def _as_json(hyperparams: Hyperparams) -> dict[str, Any]:
    return {name: to_json(value) for name, value in vars(hyperparams).items()}


def _represent(part: Any) -> str:
    """Returns a text that identifies an object: its repr without memory addresses, and its content.

    The content of a function is its code, default values and closure, and that of a callable object without a repr of
    its own, or of the object of a method, its attributes.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", _describe_part(part, []))


def _describe_part(part: Any, seen: list[Any]) -> str:
    """Returns the representation of an object, or "..." for an object in `seen`, to which objects are added."""
    if any(part is other for other in seen):
        return "..."
    if isinstance(part, frozenset | set):  # the order differs between processes
        return repr(sorted(map(repr, part)))
    name, inner = type(part).__name__, list[Any]()
    if isinstance(part, types.CodeType):
        name, inner = part.co_code.hex(), [*part.co_names, *part.co_consts]
    elif isinstance(part, functools.partial):
        name, inner = "partial", [part.func, *part.args, *itertools.chain(*part.keywords.items())]
    elif isinstance(part, tuple | list):  # for example a LossModule
        seen, inner = [*seen, part], [*part]
    elif isinstance(part, dict):
        seen, inner = [*seen, part], [*itertools.chain(*part.items())]
    elif isinstance(part, np.ndarray | jax.Array):
        return _describe_array(part)
    elif hasattr(part, "__code__"):
        seen.append(part)
        name, inner = repr(part), [part.__code__, part.__defaults__, part.__kwdefaults__, *_closure(part)]
        inner += [getattr(part.__self__, "__dict__", "")] if inspect.ismethod(part) else []
    elif hasattr(part, "__wrapped__"):  # of jax.jit or functools.cache
        name, inner = repr(part), [part.__wrapped__]
    elif callable(part) and type(part).__repr__ is object.__repr__:
        seen.append(part)
        inner = [getattr(part, "__dict__", ""), getattr(type(part).__call__, "__code__", "")]
    else:
        return repr(part)
    return f"{name}({', '.join(_describe_part(x, seen) for x in inner)})"


def _describe_array(array: Any) -> str:
    """Returns a text that identifies an array; the repr of a large one leaves out numbers."""
    if is_key(array):
        array = jax.random.key_data(array)
    content = np.asarray(array)
    data = repr(content.tolist()).encode() if content.dtype == object else content.tobytes()
    return f"{content.dtype}{content.shape}({hashlib.sha256(data).hexdigest()})"


def _closure(function: Any) -> list[Any]:
    """Returns the values of a function's free variables; those that are not assigned yet are left out."""
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values
