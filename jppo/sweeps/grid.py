"""Which lanes a sweep has: every combination of settings with every seed, by compiled program."""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jppo.config.ppo import Hyperparams, PPOConfig, check_hyperparams, check_seed, check_total_steps
from jppo.config.presets import PRESETS, preset_for
from jppo.envs import make_env
from jppo.envs.backends import choose_backend
from jppo.ppo.anakin import Anakin, make_anakin
from jppo.training.settings import check_preset, check_sizes, own_parts

NUMBERS = tuple(field.name for field in dataclasses.fields(Hyperparams))
SHAPES = tuple(field.name for field in dataclasses.fields(PPOConfig))
_MOST_HALVINGS = 4
_MOST_SEEDS = 100_000


class Task(NamedTuple):
    """A lane to be run."""

    number: int
    seed: int
    settings: dict[str, Any]
    hyperparams: Hyperparams


class Group(NamedTuple):
    """Lanes of one environment and one structure: one compiled program."""

    env: Any  # an Environment
    config: PPOConfig
    total_steps: int
    parts: dict[str, Any]  # network, optimizer and loss
    own: tuple[str, ...]  # which of these and of the environment are not named but given
    tasks: tuple[Task, ...]
    halving: bool
    lanes_at_once: int | None
    num_devices: int

    @property
    def num_updates(self) -> int:
        """Of a lane that runs to the end."""
        return self.config.num_updates(self.total_steps)

    @property
    def rungs(self) -> list[int]:
        """After which updates the worse half ends, and the last update."""
        halvings = min(_MOST_HALVINGS, len(self.tasks).bit_length() - 1) if self.halving else 0
        return sorted({-(-self.num_updates // 2**k) for k in range(halvings + 1)})

    @property
    def planned_steps(self) -> int:
        """Environment steps of all lanes together."""
        lanes, updates, before = len(self.tasks), 0, 0
        for rung in self.rungs:
            updates, before, lanes = updates + lanes * (rung - before), rung, math.ceil(lanes / 2)
        return updates * self.config.batch_size


def lay_out(
    env: Any,
    seeds: list[int],
    values: dict[str, list[Any]],
    total_steps: int | float | None,
    config: PPOConfig | None,
    hyperparams: Hyperparams | None,
    preset: str,
    **options: Any,
) -> list[Group]:
    """All lanes, by program. Raises ValueError for whatever of it cannot be."""
    for name, given, kind in (("config", config, PPOConfig), ("hyperparams", hyperparams, Hyperparams)):
        if given is not None and not isinstance(given, kind):
            raise ValueError(f"{name} = {given!r} must be of type {kind.__name__}; a setting goes in by its name")
    envs = list(env) if isinstance(env, list | tuple) else [env]
    made = [_device_env(one) for one in envs]
    if len({one.name for one in made}) < len(made) or not made:
        raise ValueError(f"env names {', '.join(one.name for one in made) or 'nothing'}: each once, please")
    groups, index = [], itertools.count()
    for given_env, one in zip(envs, made, strict=True):
        own = own_parts(given_env, options["parts"])
        chosen = PRESETS[check_preset(preset_for(one.name) if preset == "auto" else preset)]
        steps = check_total_steps(chosen.total_steps if total_steps is None else total_steps)
        for shape in _combinations(values, SHAPES):
            structure = dataclasses.replace(chosen.config if config is None else config, **shape)
            check_sizes(structure, steps)
            tasks = []
            for numbers in _combinations(values, NUMBERS):
                given = dataclasses.replace(chosen.hyperparams if hyperparams is None else hyperparams, **numbers)
                check_hyperparams(given)
                settings = {name: (shape | numbers)[name] for name in values}
                tasks += [Task(next(index), seed, settings, given) for seed in seeds]
            groups.append(Group(one, structure, steps, own=own, tasks=tuple(tasks), **options))
    return groups


def _combinations(values: dict[str, list[Any]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    chosen = {name: choices for name, choices in values.items() if name in names}
    return (dict(zip(chosen, combination, strict=True)) for combination in itertools.product(*chosen.values()))


def _device_env(env: Any) -> Any:
    if isinstance(env, str) and choose_backend(env) == "ray":
        raise ValueError(
            f"{env} is an environment of Gymnasium's, and a sweep runs on the device; jppo.sweeps.tune sweeps it"
        )
    return make_env(env)


def agent_of(group: Group) -> Anakin:
    """What its lanes run."""
    return make_anakin(group.env, group.config, total_steps=group.total_steps, **group.parts)


def identity(group: Group, task: Task) -> dict[str, Any]:
    """All that makes a lane what it is; a network or the like of one's own by how it is shown."""
    opponents = [(other.seed, _numbers(other)) for other in group.tasks] if group.halving else []
    return {
        "env": group.env.name,
        "seed": task.seed,
        "updates": group.num_updates,
        "config": dataclasses.asdict(group.config),
        "hyperparams": _numbers(task),
        "own": {name: _shown(part) for name, part in group.parts.items()},
        "halving": [group.rungs, sorted(opponents, key=repr)] if group.halving else None,
    }


def _numbers(task: Task) -> dict[str, float]:
    return {name: float(value) for name, value in vars(task.hyperparams).items()}


def _shown(part: Any) -> str:
    """A part without addresses in memory, and a function with what it computes."""
    code = getattr(part, "__code__", None)
    computes = "" if code is None else f" {code.co_code.hex()} {code.co_consts} {code.co_names}"
    return re.sub(r" at 0x[0-9a-f]+", "", f"{part!r}{computes}")


def check_settings(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Each setting's values. Raises ValueError for an unknown one, and for no or equal values."""
    values: dict[str, list[Any]] = {}
    for name, given in settings.items():
        if name not in NUMBERS + SHAPES:
            near = difflib.get_close_matches("learning_rate" if name == "lr" else name, NUMBERS + SHAPES, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NUMBERS + SHAPES)}"
            raise ValueError(f"unknown setting {name!r}; {hint}")
        if name == "hidden_sizes":
            choices = (
                list(given) if isinstance(given, list | tuple) and all(isinstance(x, tuple) for x in given) else [given]
            )
        else:
            choices = [given] if isinstance(given, str) or np.ndim(given) == 0 else list(given)
        choices = [x.item() if isinstance(x, np.generic) else x for x in choices]
        if not choices or any(x == y for x, y in itertools.combinations(choices, 2)):
            raise ValueError(f"{name} = {given!r} must be a value or several that differ")
        values[name] = choices
    return values


def check_seeds(seeds: Any) -> list[int]:
    """Which seeds. Raises ValueError for none, equal ones, and what is none."""
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool):
        if not 1 <= seeds <= _MOST_SEEDS:
            raise ValueError(f"seeds = {seeds} must be from 1 to {_MOST_SEEDS:,}")
        return list(range(int(seeds)))
    if isinstance(seeds, bool | float | str) or seeds is None:
        raise ValueError(f"seeds = {seeds!r} must be a number of seeds, or several that differ")
    chosen = [check_seed(seed) for seed in seeds]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"seeds = {seeds!r} must be a number of seeds, or several that differ")
    return chosen


def check_count(name: str, value: Any) -> int | None:
    """The number, or None. Raises ValueError where it is neither."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} = {value!r} must be a whole number of at least 1")
    return value


def check_devices(num_devices: int | None) -> int:
    """How many devices; all where None. Raises ValueError where there are fewer."""
    there = len(jax.local_devices())
    if num_devices is None:
        return there
    if check_count("num_devices", num_devices) and num_devices > there:
        raise ValueError(f"num_devices = {num_devices}; JAX has {there} here ({jax.devices()[0].platform})")
    return num_devices
