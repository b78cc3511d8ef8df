"""Groups runs that differ only in their seeds, and names the settings that differ between groups."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jppo.config.checks import escape_controls
from jppo.config.presets import PRESETS, preset_for
from jppo.config.schedules import Schedule, from_json
from jppo.errors import Refused
from jppo.runs.run_dir import read_config

_NO_SETTINGS = {"config", "hyperparams", "actors", "seed", "versions", "video"}
_EVALUATION = {"eval_every", "eval_episodes", "eval_sampled"}  # no settings unless evaluations can end the run


class RunGroup(NamedTuple):
    """The runs of one setting."""

    env: str
    settings: dict[str, Any]  # of all groups together, those that differ and that this group has
    paths: list[Path]
    seeds: list[int]

    @property
    def label(self) -> str:
        """The settings that differ, as text."""
        return ", ".join(f"{name}={format_value(value)}" for name, value in self.settings.items())


def group_runs(run_dirs: Sequence[Path]) -> list[RunGroup]:
    """Returns the groups in the order of their first runs. Raises ValueError if a config.json is missing or damaged."""
    configs = [read_config(path) for path in run_dirs]
    settings = [all_settings(config, path) for config, path in zip(configs, run_dirs, strict=True)]
    names = dict.fromkeys(name for setting in settings for name in setting if name != "env")
    differing = [name for name in names if len({repr(setting.get(name)) for setting in settings}) > 1]
    groups: dict[str, RunGroup] = {}
    for path, config, setting in zip(run_dirs, configs, settings, strict=True):
        changed = {name: setting[name] for name in differing if name in setting}
        new = RunGroup(env=setting["env"], settings=changed, paths=[], seeds=[])
        group = groups.setdefault(repr(sorted(setting.items())), new)
        group.paths.append(path)
        group.seeds.append(config["seed"])
    return list(groups.values())


def all_settings(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Returns all settings in a config.json but the seed and the versions, as one mapping.

    Raises:
      ValueError: a hyperparameter is not a number or a schedule.
    """
    try:
        numbers = {name: from_json(value) for name, value in config["hyperparams"].items()}
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Refused(f"{run_dir}/config.json is damaged: {error}") from None
    left_out = _NO_SETTINGS if config.get("stop_at_return") is not None else _NO_SETTINGS | _EVALUATION
    others = {name: value for name, value in config.items() if name not in left_out}
    return config["config"] | numbers | others | config.get("actors", {})


def changed_settings(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Returns the settings in a config.json that differ from the preset of its environment. Raises ValueError."""
    preset = PRESETS[preset_for(config["env"])]
    usual = vars(preset.config) | vars(preset.hyperparams) | {"total_steps": preset.total_steps}
    settings = {name: tuple(x) if isinstance(x, list) else x for name, x in all_settings(config, run_dir).items()}
    return {name: value for name, value in settings.items() if name in usual and value != usual[name]}


def format_value(value: Any) -> str:
    """Returns the value of a setting as text for tables and labels."""
    if isinstance(value, float) and not isinstance(value, Schedule):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        separator = "," if any(isinstance(part, str) for part in value) else "x"  # names, or sizes of layers
        return escape_controls(separator.join(map(str, value)) or "()")
    return escape_controls(str(value))
