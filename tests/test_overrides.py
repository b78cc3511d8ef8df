"""Settings by name: `jppo.train(env, num_envs=8, learning_rate=1e-3)`, mappings, and hints for wrong names."""

import dataclasses
import inspect
import pickle
import pydoc
import re
import typing

import pytest
from lenient import lenient_env

import jppo
from jppo.config import keywords
from jppo.config.overrides import SCALE_ENVS, resolve_settings, take_ray, take_run
from jppo.config.run import EVENT_FIELDS, SWEEP_FIELDS
from jppo.config.schedules import Schedule
from jppo.config.words import WORDS, explain
from jppo.sweeps.tune_trial import apply_space
from jppo.training.settings import RunSettings

PRESET = jppo.PRESETS["pendulum"]


def test_overrides_replace_single_values_of_the_preset():
    config, hyperparams = resolve_settings(PRESET, None, None, {"num_envs": 8, "learning_rate": 0.5})
    assert config == PRESET.config.replace(num_envs=8)
    assert hyperparams == PRESET.hyperparams.replace(learning_rate=0.5)


def test_overrides_replace_values_of_records_and_mappings():
    records = jppo.PPOConfig(num_epochs=2), jppo.Hyperparams(gamma=0.5)
    assert resolve_settings(PRESET, *records, {}) == records
    assert resolve_settings(PRESET, {"num_epochs": 2}, {"gamma": 0.5}, {}) == records
    config, hyperparams = resolve_settings(PRESET, *records, {"num_steps": 16, "gamma": 0.25})
    assert config == jppo.PPOConfig(num_epochs=2, num_steps=16)
    assert hyperparams == jppo.Hyperparams(gamma=0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"gamma": 0.5}}, "config has no field 'gamma'; it is a field of hyperparams"),
        ({"hyperparams": {"lr": 0.5}}, "hyperparams has no field 'lr'; did you mean learning_rate?"),
        ({"config": 7}, "config = 7 must be a jppo.PPOConfig or a mapping of its fields"),
        ({"num_envs": 0}, "num_envs = 0 must be a whole number of at least 1"),
        ({"gamma": 2.0}, "gamma = 2 is outside"),
        ({"network": "rnn"}, "network = 'rnn' is not one of mlp, cnn"),
    ],
)
@pytest.mark.parametrize("function", [jppo.train, jppo.bench, jppo.sweep])
def test_invalid_settings_raise(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(lenient_env("CartPole-v1"), **arguments)


@pytest.mark.parametrize("name", ["loss", "advantages"])
@pytest.mark.parametrize("function", [jppo.train, jppo.bench, jppo.sweep])
def test_names_instead_of_functions_raise(function, name):
    with pytest.raises(ValueError, match=f"{name} = 'ppo' must be a function"):
        function(lenient_env("CartPole-v1"), **{name: "ppo"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": "x"}, "run = 'x' must be a jppo.RunConfig or a mapping of its fields"),
        ({"run": {"resume": True}}, "resume needs a run_dir"),
        ({"run": {"resme": True}}, "run has no field 'resme'; did you mean resume?"),
        ({"ray": 2}, "ray = 2 must be a jppo.RayConfig or a mapping of its fields"),
        ({"ray": {"num_actors": 2}}, "runs on the device, without actors"),
    ],
)
def test_run_and_ray_are_records_or_mappings(arguments, message):
    with pytest.raises(ValueError, match=message):
        jppo.train(lenient_env("CartPole-v1"), **arguments)


def test_unknown_fields_raise_with_the_right_name():
    for call in (jppo.Hyperparams, jppo.Hyperparams().replace):
        with pytest.raises(TypeError, match=r"Hyperparams has no field 'lr'; did you mean learning_rate\?$"):
            call(lr=0.1)
    for call in (jppo.PPOConfig, jppo.PPOConfig().replace):
        with pytest.raises(TypeError, match=r"PPOConfig has no field 'n_envs'; did you mean num_envs\?$"):
            call(n_envs=1)


@pytest.mark.parametrize("function", [jppo.train, jppo.bench, jppo.sweep, jppo.tune.trainable])
def test_unknown_arguments_raise_with_the_right_name(function):
    for wrong, right in (("lr", "learning_rate"), ("n_envs", "num_envs"), ("hiden_sizes", "hidden_sizes")):
        message = rf"{function.__name__}\(\) has no argument '{wrong}'; did you mean {right}\?$"
        with pytest.raises(TypeError, match=message):
            function("CartPole-v1", **{wrong: 1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("actor_cpu", r"did you mean actor_cpus\?$"),
        ("eval_evry", r"did you mean eval_every\?$"),
        ("batch_size", r"no argument 'batch_size'; num_minibatches = num_envs\*num_steps/batch_size$"),
        ("train_batch_size", r"an update takes num_envs\*num_steps samples: set one of these$"),
        ("policy_kwargs", r"; hidden_sizes, activation and network describe the network$"),
        ("policy", r"; hidden_sizes, activation and network describe the network$"),
        ("device", r"; JAX uses a GPU if its GPU build is installed; JAX_PLATFORMS=cpu selects the CPU$"),
        ("verbose", r'; progress="auto" shows the progress'),
        ("tensorboard_log", r"; a run with run_dir writes TensorBoard events there$"),
        ("n_steps", r"; did you mean num_steps\?$"),
        ("n_eval_episodes", r"; did you mean eval_episodes\?$"),
        ("frobnicate", r"has no argument 'frobnicate'; see help\(train\)$"),
        (
            "pool",
            r"has no argument 'pool'; it is an option of an environment; pass jppo\.make_env\(name, \.\.\.\) as env$",
        ),
    ],
)
def test_unknown_arguments_raise_with_a_hint(name, message):
    with pytest.raises(TypeError, match=message):
        jppo.train("CartPole-v1", **{name: 1})


def test_arguments_of_actors_are_no_arguments_of_sweeps():
    with pytest.raises(TypeError, match=r"no argument 'num_actors'; it is a field of jppo\.RayConfig, for jppo\.tr"):
        jppo.sweep("CartPole-v1", num_actors=2)


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("run_dir", "jppo.train"),
        ("resume", "jppo.train"),
        ("progress", "jppo.train and jppo.sweep"),
        ("callback", "jppo.train and jppo.tune"),
        ("eval_every", "jppo.train, jppo.sweep and jppo.tune"),
    ],
)
def test_arguments_of_runs_are_no_arguments_of_bench(name, functions):
    place = f"it is a field of jppo.RunConfig, for {functions} only"
    with pytest.raises(TypeError, match=re.escape(f"bench() has no argument {name!r}; {place}")):
        jppo.bench("CartPole-v1", **{name: "x"})
    with pytest.raises(ValueError, match=re.escape(f"config has no field {name!r}; {place}")):
        resolve_settings(PRESET, {name: "x"}, None, {})


def test_directories_must_be_paths():
    with pytest.raises(ValueError, match=r"^run_dir = 3 must be a path$"):
        jppo.train("CartPole-v1", run_dir=3)
    with pytest.raises(ValueError, match=r"^sweep_dir = 3 must be a path$"):
        jppo.sweep("CartPole-v1", sweep_dir=3)


ALGORITHM = [field for kind in (jppo.PPOConfig, jppo.Hyperparams) for field in dataclasses.fields(kind)]
ACTORS, RUN = dataclasses.fields(jppo.RayConfig), dataclasses.fields(jppo.RunConfig)
FIELDS = {field.name: field for field in (*ALGORITHM, *ACTORS, *RUN) if field.name != "network"}
WIDER = {  # types of keywords that accept more than their field, or less than Any
    **dict.fromkeys(("hidden_sizes",), tuple[int, ...] | list[int]),
    **dict.fromkeys(("actor_obs", "critic_obs"), tuple[str, ...] | list[str]),
    **{field.name: float | Schedule for field in dataclasses.fields(jppo.Hyperparams)},
}


def keywords_of(record, events, several=False):
    """Returns the expected annotations of a TypedDict, from the fields of the dataclasses."""
    kinds = {SCALE_ENVS: int} | {f.name: WIDER.get(f.name, f.type) for f in record if f.name in FIELDS}
    if several:
        kinds = {name: keywords.Many[kind] for name, kind in kinds.items()}
    return kinds | {name: FIELDS[name].type for name in events}


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (jppo.train, keywords_of([*ALGORITHM, *ACTORS, *RUN], ())),
        (jppo.bench, keywords_of([*ALGORITHM, *ACTORS], ())),
        (jppo.sweep, keywords_of(ALGORITHM, SWEEP_FIELDS, several=True)),
        (jppo.tune.trainable, keywords_of([*ALGORITHM, *ACTORS], EVENT_FIELDS)),
    ],
)
def test_typed_keywords_are_the_fields_of_the_dataclasses(function, kinds):
    *_, last = inspect.signature(inspect.unwrap(function)).parameters.values()
    (declared,) = typing.get_args(last.annotation)
    assert typing.get_type_hints(declared) == kinds


def test_the_signature_lists_every_setting_with_its_default():
    parameters = inspect.signature(jppo.train).parameters
    assert set(FIELDS) < set(parameters)
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())
    for field in (*ACTORS, *RUN):
        assert parameters[field.name].default == field.default
    assert "num_envs: int = <preset>" in pydoc.plain(pydoc.render_doc(jppo.train))
    with pytest.raises(TypeError, match=r"^train\(\) has no argument 'x'; see help\(train\)$"):
        jppo.train("CartPole-v1", x=1)


def test_words_of_other_libraries_lead_to_names_that_exist():
    public = set(inspect.signature(jppo.train).parameters) | {"num_episodes", "selection"}
    for word, answer in WORDS.items():
        assert word not in FIELDS or word == "deterministic", "a field of jppo needs no translation"
        if " " not in answer:
            assert set(answer.split("|")) <= public | {"max_steps_in_episode"}, word
            assert explain(word, public).startswith("did you mean") or word == "max_episode_steps"


@pytest.mark.parametrize("word", sorted(WORDS))
def test_no_word_of_another_library_is_guessed_by_spelling(word):
    """In train, evaluate and as attributes: the answer of the table, and not the name with similar letters."""
    for function in (jppo.train, jppo.evaluate):
        if word not in inspect.signature(function).parameters:
            with pytest.raises(TypeError) as error:
                function("CartPole-v1", **{word: 1})
            names = list(inspect.signature(function).parameters)
            assert str(error.value).endswith(f"; {explain(word, names)}") or "option of an environment" in str(
                error.value
            )
    with pytest.raises(AttributeError) as attribute:
        getattr(jppo, word)
    assert str(attribute.value) == f"module 'jppo' has no attribute {word!r}; {explain(word)}"


def test_attributes_of_results_and_policies_have_hints(tmp_path):
    class Bare(jppo.TrainedPolicy):
        def __init__(self):
            """Has no network."""

    result = jppo.Result({}, Bare(), {}, None, None, None, {})
    for owner, kind in ((result, "Result"), (result.policy, "Bare")):
        with pytest.raises(
            AttributeError, match=rf"^{kind} has no attribute 'predict'; policy\.act\(obs\) returns act"
        ):
            owner.predict  # noqa: B018
        with pytest.raises(AttributeError, match=rf"^{kind} has no attribute 'sumary'$"):
            owner.sumary  # noqa: B018
    assert pickle.loads(pickle.dumps(result._replace(policy=None))) == result._replace(policy=None)


def test_overrides_replace_single_values_of_run_and_ray():
    run, others = take_run({"eval_every": 5, "max_checkpoints": 1}, {"eval_every": 2, "gamma": 0.5})
    assert (run, others) == (jppo.RunConfig(eval_every=2, max_checkpoints=1), {"gamma": 0.5})
    ray, others = take_ray(jppo.RayConfig(num_actors=3, policy_lag=1), {"num_actors": 2})
    assert (ray, others) == (jppo.RayConfig(num_actors=2, policy_lag=1), {})
    assert take_ray(None, {"gamma": 0.5}) == (None, {"gamma": 0.5})


def test_sweeps_and_trials_save_nothing_to_a_run_directory():
    with pytest.raises(ValueError, match=r"run\.run_dir = x has no effect in jppo\.sweep, .*; pass sweep_dir$"):
        jppo.sweep("CartPole-v1", run_dir="x")
    for name, value in {"run_dir": "x", "progress": "auto"}.items():
        with pytest.raises(ValueError, match=rf"run\.{name} = .* has no effect in jppo\.tune\..*; leave it out$"):
            jppo.tune.trainable("CartPole-v1", **{name: value})


@pytest.mark.slow
def test_train_and_sweep_accept_overrides():
    env, sizes = lenient_env("CartPole-v1"), {"num_envs": 4, "num_steps": 16, "hidden_sizes": [8]}
    result = jppo.train(env, total_steps=64, network="mlp", learning_rate=0.25, num_devices=1, **sizes)
    assert result.agent.config == jppo.PRESETS["cleanrl-classic"].config.replace(**sizes)
    swept = jppo.sweep(env, seeds=1, total_steps=64, network=["mlp"], num_devices=1, **sizes)
    assert swept.runs[0].agent.config == result.agent.config
    assert swept.runs[0].settings["hidden_sizes"] == (8,)


def test_a_search_space_overrides_the_settings_of_a_trial():
    settings = RunSettings(env="CartPole-v1", network="mlp", overrides={"gamma": 0.9, "clip_eps": 0.1})
    space = {"num_envs": 8, "gamma": 0.5, "network": "cnn", "seed": 3}
    changed = apply_space(space, settings)
    assert (changed.seed, changed.network) == (3, None)
    assert changed.overrides == {"num_envs": 8, "gamma": 0.5, "network": "cnn", "clip_eps": 0.1}
