"""Settings passed by name: fields of PPOConfig, Hyperparams, RayConfig and RunConfig that replace single values."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from jppo.config.checks import check_int, find_similar
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.presets import Preset
from jppo.config.ray import RayConfig
from jppo.config.run import EVALUATION_FIELDS, EVENT_FIELDS, SWEEP_FIELDS, RunConfig
from jppo.config.words import explain
from jppo.errors import Refused

HYPERPARAM_NAMES = tuple(field.name for field in dataclasses.fields(Hyperparams))
SCALE_ENVS, SCALED = "scale_envs", ("num_envs", "num_minibatches")  # not a field, and the fields that it multiplies
CONFIG_NAMES = (*(field.name for field in dataclasses.fields(PPOConfig)), SCALE_ENVS)
ENV_OPTIONS = ("max_steps_in_episode", "max_episode_steps", "pool", "scenario", "layout", "ruleset")  # of `make_env`
_HINTS = {
    **{
        name: "it is an option of an environment; pass jppo.make_env(name, ...) as env"
        + ", or a function that returns gymnasium.make(name, ...)" * name.startswith("max_")
        for name in ENV_OPTIONS
    },
    SCALE_ENVS: "pass it beside config, or use PPOConfig(...).scale_envs(K)",
}
for _names, _functions in {
    tuple(field.name for field in dataclasses.fields(RunConfig)): "jppo.train",
    EVENT_FIELDS: "jppo.train and jppo.tune",
    ("progress",): "jppo.train and jppo.sweep",
    EVALUATION_FIELDS: "jppo.train, jppo.sweep and jppo.tune",
}.items():
    _HINTS |= dict.fromkeys(_names, f"it is a field of jppo.RunConfig, for {_functions} only")
_HINTS |= dict.fromkeys(
    (field.name for field in dataclasses.fields(RayConfig)),
    "it is a field of jppo.RayConfig, for jppo.train, jppo.bench and jppo.tune.trainable only",
)
F = TypeVar("F", bound=Callable[..., Any])
_HINTS["deterministic"] = explain("deterministic")  # a field of RunConfig, and another setting in other libraries
R = TypeVar("R")


def resolve_settings(
    preset: Preset, config: Any, hyperparams: Any, overrides: Mapping[str, Any], searched: Collection[str] = ()
) -> tuple[PPOConfig, Hyperparams]:
    """Returns the config and hyperparams of a run: the arguments, or those of the preset, with the overrides.

    Args:
      config, hyperparams: a record, a mapping of its fields, or None for the preset's.
      overrides: values of fields of either record.
      searched: see `override`.

    Raises:
      ValueError: an unknown name or an invalid value.
    """
    config = preset.config if config is None else as_record("config", config, PPOConfig)
    hyperparams = preset.hyperparams if hyperparams is None else as_record("hyperparams", hyperparams, Hyperparams)
    return override(config, hyperparams, overrides, searched)


def override(
    config: PPOConfig, hyperparams: Hyperparams, values: Mapping[str, Any], searched: Collection[str] = ()
) -> tuple[PPOConfig, Hyperparams]:
    """Returns both with other values of some fields.

    Args:
      searched: names of the values from a search space. scale_envs multiplies each of num_envs and num_minibatches
        that is not among them.

    Raises:
      ValueError: an unknown name, an invalid value, or scale_envs together with a field that it multiplies, both from
        the arguments or both from the search space.
    """
    for name in values:
        if name not in CONFIG_NAMES + HYPERPARAM_NAMES:
            raise Refused(f"unknown setting {name!r}{suggest_setting(name, CONFIG_NAMES + HYPERPARAM_NAMES)}")
    structure = {name: value for name, value in values.items() if name in CONFIG_NAMES}
    if SCALE_ENVS in structure:
        factor = check_int(SCALE_ENVS, structure.pop(SCALE_ENVS))
        check_scale_envs(factor, *(x for x in structure if (x in searched) == (SCALE_ENVS in searched)))
        for name in set(SCALED).difference(searched):
            structure[name] = factor * check_int(name, structure.get(name, getattr(config, name)))
    numbers = {name: value for name, value in values.items() if name in HYPERPARAM_NAMES}
    return config.replace(**structure), hyperparams.replace(**numbers)


def check_scale_envs(factor: Any, *names: str) -> None:
    """Raises ValueError if `scale_envs` is used together with explicit values of the fields that it multiplies."""
    for name in names:
        if name in SCALED:
            raise Refused(
                f"scale_envs = {factor} multiplies the num_envs and num_minibatches of the preset or of config; leave "
                f"out {name} or scale_envs"
            )


def as_record(name: str, value: Any, kind: type[R]) -> R:
    """Returns an argument as a record of this kind.

    Raises:
      ValueError: the argument is neither such a record nor a mapping of its fields.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise Refused(f"{name} = {value!r} must be a jppo.{kind.__name__} or a mapping of its fields")
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise Refused(f"{name} has no field {key!r}{suggest_setting(str(key), fields)}")
    return kind(**value)


def take_fields(record: R, overrides: Mapping[str, Any]) -> tuple[R, dict[str, Any]]:
    """Returns the record with the overrides of its fields, and the other overrides."""
    names = {field.name for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    own = {name: value for name, value in overrides.items() if name in names}
    others = {name: value for name, value in overrides.items() if name not in names}
    return dataclasses.replace(record, **own), others  # type: ignore[type-var]


def take_run(run: RunConfig | Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the RunConfig of a run and the overrides of other records. Raises ValueError for an invalid value."""
    return take_fields(as_record("run", run, RunConfig), overrides)


def take_ray(
    ray: RayConfig | Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> tuple[RayConfig | None, dict[str, Any]]:
    """Returns the RayConfig of a run, None if nothing was set, and the overrides of other records.

    Raises:
      ValueError: an invalid value.
    """
    record, others = take_fields(RayConfig() if ray is None else as_record("ray", ray, RayConfig), overrides)
    return (None if ray is None and len(others) == len(overrides) else record), others


def take_events(
    run: RunConfig | Mapping[str, Any], overrides: Mapping[str, Any], function: str
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the same as `take_run` for jppo.sweep or a function of jppo.tune, which support only some of the fields.

    Raises:
      ValueError: an unsupported field is set, or a field of evaluations is set without `eval_every`.
    """
    record, others = take_run(run, overrides)
    is_sweep = function == "jppo.sweep"
    supported = SWEEP_FIELDS if is_sweep else EVENT_FIELDS
    for name, default in vars(RunConfig()).items():
        if name not in supported and (value := getattr(record, name)) != default:
            remedy = "pass sweep_dir" if is_sweep and name == "run_dir" else "leave it out"
            raise Refused(
                f"run.{name} = {value} has no effect in {function}, which supports {', '.join(supported)}; {remedy}"
            )
    record.check_evaluations()
    return record, others


def explain_keywords(function: F) -> F:
    """Decorates a public function. An unknown keyword raises TypeError with a hint.

    The signature lists the keys of `**overrides: Unpack[...]`, for help() and for completion in notebooks.
    """
    *parameters, last = inspect.signature(function).parameters.values()
    own = [*parameters, last] if last.kind is not last.VAR_KEYWORD else parameters
    names = [parameter.name for parameter in own]
    if own is parameters:
        (keywords,) = typing.get_args(last.annotation)
        defaults = vars(RunConfig()) | vars(RayConfig())
        for name, kind in keywords.__annotations__.items():
            default = defaults.get(name, _OF_PRESET)
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
            names.append(name)
        if "run" in names:  # `take_events` explains those that have no effect
            names += [field.name for field in dataclasses.fields(RunConfig)]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                hint = suggest_setting(name, names) or f"; see help({function.__name__})"
                raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
        return function(*args, **kwargs)

    checked.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


class _OfPreset:
    """The default of a setting of the algorithm in a signature."""

    def __repr__(self) -> str:
        return "<preset>"


_OF_PRESET = _OfPreset()


def suggest_setting(name: str, names: Iterable[str]) -> str:
    """Returns "; " and a hint for an unknown name: its place in a record, or a similar name. "" if there is none."""
    names = list(names)
    if name in _HINTS:
        return f"; {_HINTS[name]}"
    for argument, kinds in {"config": CONFIG_NAMES, "hyperparams": HYPERPARAM_NAMES}.items():
        if name in kinds and name not in names:
            return f"; it is a field of {argument}"
    if hint := explain(name, names):
        return f"; {hint}"
    similar = find_similar(name, names)
    return f"; did you mean {similar}?" if similar else ""


def take_network(network: Any, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the network object and the overrides; the name of a network ("mlp", "cnn") or a list of names becomes an
    override of PPOConfig.network."""
    if isinstance(network, str) or (isinstance(network, list) and all(isinstance(one, str) for one in network)):
        return None, {**overrides, "network": network}
    return network, dict(overrides)
