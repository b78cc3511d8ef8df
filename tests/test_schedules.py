"""Tests of schedules: values against independent formulas, forms as JSON and text, and runs that use them."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import SMALL
from lenient import lenient
from probes import ObsActionReward

import jppo
from jppo.actors.local import LocalRunner
from jppo.config.ppo import check_hyperparams
from jppo.config.schedules import from_json, parse, show_parsable, to_json
from jppo.ppo.types import current_hyperparams
from jppo.runs.run_dir import config_of, read_config

linear, cosine, exponential = jppo.schedules.linear, jppo.schedules.cosine, jppo.schedules.exponential
piecewise, warmup = jppo.schedules.piecewise, jppo.schedules.warmup

PROGRESS = np.linspace(0.0, 1.0, 41)
DECAY = optax.cosine_decay_schedule(0.3, 40, alpha=0.1)
STEPS = piecewise([0.3, 0.2, 0.1], [0.25, 0.75])
# Schedule, its values at PROGRESS, JSON, text and repr.
FORMS = {
    "linear": (linear(0.3, 0.1), np.linspace(0.3, 0.1, 41), {"linear": [0.3, 0.1]}, "0.3:0.1", "linear(0.3, 0.1)"),
    "cosine": (
        cosine(0.3, 0.03),
        [DECAY(step) for step in range(41)],
        {"cosine": [0.3, 0.03]},
        "cosine:0.3:0.03",
        "cosine(0.3, 0.03)",
    ),
    "exponential": (
        exponential(0.3, 3e-3),
        np.geomspace(0.3, 3e-3, 41),
        {"exponential": [0.3, 0.003]},
        "exponential:0.3:0.003",
        "exponential(0.3, 0.003)",
    ),
    "piecewise": (
        STEPS,
        np.array([0.3, 0.2, 0.1])[np.digitize(PROGRESS, [0.25, 0.75])],
        {"piecewise": [[0.3, 0.2, 0.1], [0.25, 0.75]]},
        "piecewise:0.3:0.25:0.2:0.75:0.1",
        "piecewise([0.3, 0.2, 0.1], [0.25, 0.75])",
    ),
    "warmup": (
        warmup(0.25, 0.3),
        np.interp(PROGRESS, [0.0, 0.25, 1.0], [0.0, 0.3, 0.3]),
        {"warmup": [0.25, 0.3]},
        "warmup:0.25:0.3",
        "warmup(0.25, 0.3)",
    ),
    "warmup of linear": (
        warmup(0.25, linear(0.3, 0)),
        np.interp(PROGRESS, [0.0, 0.25, 1.0], [0.0, 0.3, 0.0]),
        {"warmup": [0.25, {"linear": [0.3, 0.0]}]},
        "warmup:0.25:0.3:0",
        "warmup(0.25, linear(0.3, 0))",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_values_equal_an_independent_formula(name):
    schedule, expected, *_ = FORMS[name]
    np.testing.assert_allclose([schedule(float(p)) for p in PROGRESS], expected, rtol=1e-6, atol=1e-9)
    leaves = jax.tree.map(jnp.float32, schedule)
    values = jax.jit(lambda s, p: s(p))(leaves, jnp.float32(PROGRESS))
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-7)


def test_vmap_over_schedules_equals_a_loop():
    stacked = warmup(jnp.array([0.2, 0.4, 0.6]), cosine(jnp.array([0.3, 0.2, 0.1]), jnp.zeros(3)))
    together = jax.vmap(lambda schedule: schedule(jnp.float32(0.5)))(stacked)
    alone = [warmup(f, cosine(a, 0.0))(0.5) for f, a in ((0.2, 0.3), (0.4, 0.2), (0.6, 0.1))]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_linear_to_zero_is_bit_for_bit_the_annealed_rate():
    @jax.jit
    def annealed(rate, update, num_updates):
        return rate * jnp.maximum(0.0, 1.0 - update / num_updates)

    schedule, rate = jax.jit(jppo.schedules.linear(jnp.float32(3e-4), jnp.float32(0.0)).__call__), jnp.float32(3e-4)
    for update in range(978):
        progress = jnp.minimum(1.0, jnp.int32(update) / jnp.int32(977))
        assert schedule(progress) == annealed(rate, jnp.int32(update), jnp.int32(977))


@pytest.mark.parametrize("name", FORMS)
def test_json_text_and_repr_give_the_schedule_back(name):
    schedule, _, as_json, text, shown = FORMS[name]
    assert to_json(schedule) == as_json
    assert from_json(json.loads(json.dumps(as_json))) == schedule
    assert show_parsable(schedule) == text
    assert parse(text) == schedule
    assert repr(schedule) == shown
    assert eval(shown) == schedule


def test_numbers_have_the_same_forms():
    assert (to_json(0.1), to_json(float("inf")), from_json("inf"), parse("3e-4")) == (0.1, "inf", float("inf"), 3e-4)
    exact = linear(1 / 3, 2.5e-4)
    assert from_json(json.loads(json.dumps(to_json(exact)))) == parse(show_parsable(exact)) == exact


@pytest.mark.parametrize(
    "text",
    ["", "a", "1:", "1:2:3", "cosin:1:2", "cosine:1", "piecewise:1:0.5", "warmup:0.1", "warmup:x:1", "linear:1:y"],
)
def test_malformed_text_raises(text):
    with pytest.raises(ValueError, match=rf"^'{text}' is not a number or a schedule; write 0\.01, 0\.01:0 \(linear\)"):
        parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": linear(1e-3, -1)}, r"learning_rate = linear\(0.001, -1\) has .*: -1 is outside \[0, inf\)"),
        ({"gamma": cosine(0.9, 1.1)}, r"gamma = cosine\(0.9, 1.1\) has .*: 1.1 is outside \[0, 1\]"),
        ({"gamma": warmup(0.1, linear(0.9, 2))}, r"gamma = warmup.*: 2 is outside \[0, 1\]"),
        ({"clip_eps": warmup(0.1, 0.2)}, r"clip_eps = warmup\(0.1, 0.2\) has .*: 0 is outside \(0, inf\)"),
        ({"ent_coef": exponential(0.01, 0)}, r"exponential\(0.01, 0\): both numbers must be positive"),
        ({"ent_coef": linear("much", 0)}, "'much' is not a finite number"),
        ({"ent_coef": linear(float("nan"), 0)}, "nan is not a finite number"),
        ({"max_grad_norm": linear(float("inf"), 1)}, "inf is not a finite number"),
        ({"gamma": piecewise([0.9, 0.8, 0.7], [0.5, 0.5])}, "the boundaries must increase and lie between 0 and 1"),
        ({"gamma": piecewise([0.9, 0.8], [1.0])}, "the boundaries must increase and lie between 0 and 1"),
        ({"gamma": piecewise([0.9, 1.8], [0.5])}, r"1.8 is outside \[0, 1\]"),
        ({"learning_rate": warmup(1.0, 1e-3)}, "the fraction 1.0 must be between 0 and 1"),
        ({"learning_rate": warmup(linear(0.1, 0.2), 1e-3)}, r"the fraction linear\(0.1, 0.2\) must be between 0 and 1"),
        ({"ent_coef": piecewise([1, 2], [linear(0.1, 0.2)])}, "the boundaries must increase and lie between 0 and 1"),
        ({"learning_rate": warmup(0.1, exponential(1, -1))}, "both numbers must be positive"),
    ],
)
def test_invalid_schedules_raise(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_hyperparams(jppo.Hyperparams(**values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0.1, 0.2]), r"piecewise\(\[1, 2\], \[0.1, 0.2\]\) has 2 values and 2 boundaries"),
        (([1], []), "it needs at least one boundary"),
        ((1, 0.5), r"piecewise\(1, 0.5\) needs a list of values"),
    ],
)
def test_piecewise_with_wrong_lengths_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        piecewise(*arguments)


ALL = jppo.Hyperparams(
    learning_rate=warmup(0.25, cosine(0.02, 0)),
    gamma=linear(0.9, 0.8),
    gae_lambda=cosine(0.9, 0.5),
    clip_eps=exponential(0.3, 0.1),
    vf_clip_eps=piecewise([0.1, 0.3], [0.5]),
    vf_coef=linear(0.2, 0.8),
    ent_coef=linear(0.05, 0.0),
    max_grad_norm=linear(0.1, 0.3),
    target_kl=linear(0.1, 0.2),
    adam_eps=exponential(1e-3, 1e-5),
)


@pytest.mark.slow
def test_an_update_with_schedules_equals_an_update_with_their_values():
    """At update 3 of 4, after which all ten hyperparameters have other values than at the start."""
    agent = jppo.make_anakin(ObsActionReward(), SMALL(normalize_reward=True), total_steps=4 * 32)
    at = 0.75
    angle, rest = 0.5 * (1 + np.cos(np.pi * at)), 0.5 * (1 + np.cos(np.pi * (at - 0.25) / 0.75))
    values = jppo.Hyperparams(
        **{"learning_rate": 0.02 * rest, "gamma": 0.825, "gae_lambda": 0.5 + 0.4 * angle, "vf_clip_eps": 0.3},
        **{"clip_eps": 0.3 * (1 / 3) ** at, "vf_coef": 0.65, "ent_coef": 0.0125, "max_grad_norm": 0.25},
        **{"target_kl": 0.175, "adam_eps": 10 ** (-3 - 2 * at)},
    )
    outcomes = []
    for hyperparams in (ALL, values):
        state = agent.init(jax.random.key(0), hyperparams)
        state = state.replace(train=state.train.replace(update=jnp.int32(3)))
        after, metrics = jax.jit(agent.step)(state)
        outcomes.append((after.train, metrics))
    (scheduled, metrics), (constant, expected) = outcomes
    for a, b in zip(jax.tree.leaves(scheduled.policy_state), jax.tree.leaves(constant.policy_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    logged = {name: value for name, value in metrics.items() if name not in expected}
    assert set(logged) == {f"hyperparams/{name}" for name in vars(ALL)} - {"hyperparams/learning_rate"}
    for name, value in logged.items():
        np.testing.assert_allclose(value, getattr(values, name.removeprefix("hyperparams/")), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(scheduled.reward_stats.mean, constant.reward_stats.mean, rtol=1e-5)
    assert scheduled.hyperparams == jax.tree.map(jnp.float32, ALL)


@pytest.mark.slow
def test_progress_ends_at_one():
    state = jppo.make_anakin(ObsActionReward(), SMALL(), total_steps=4 * 32).init(jax.random.key(0), ALL).train
    for update, expected in ((0, 0.9), (2, 0.85), (4, 0.8), (9, 0.8)):
        assert current_hyperparams(state.replace(update=jnp.int32(update))).gamma == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["device", "ray"])
def test_both_modes_use_and_log_the_values(backend, monkeypatch):
    """gamma is 0 in the first half; the discounted return, which scales rewards, is then the reward."""
    gammas, start = [], LocalRunner.start
    monkeypatch.setattr(
        LocalRunner, "start", lambda self, policy, gamma: (gammas.append(gamma), start(self, policy, gamma))[1]
    )
    options = {"num_actors": 0} if backend == "ray" else {"num_devices": 1}
    hyperparams = jppo.Hyperparams(gamma=piecewise([0.0, 0.9], [0.5]), ent_coef=linear(0.1, 0.0))
    with lenient():
        result = jppo.train(
            "CartPole-v1",
            backend=backend,
            total_steps=4 * 32,
            config=SMALL(normalize_reward=True),
            hyperparams=hyperparams,
            **options,
        )
    np.testing.assert_allclose(result.metrics["hyperparams/gamma"], [0, 0, 0.9, 0.9], rtol=1e-6)
    np.testing.assert_allclose(result.metrics["hyperparams/ent_coef"], [0.1, 0.075, 0.05, 0.025], rtol=1e-6)
    np.testing.assert_allclose(result.metrics["learning_rate"], 2.5e-4 * np.array([1, 0.75, 0.5, 0.25]), rtol=1e-6)
    assert gammas == ([0.0, 0.0, 0.9, 0.9] if backend == "ray" else [])
    state = result.state if backend == "ray" else result.state.train
    returns = state.reward_stats.mean  # half of the samples are 1, the other half between 1 and 10
    assert 1.2 < returns < 5.5


class Interrupting(jppo.NullReporter):
    """Sends Ctrl-C after two updates."""

    def update(self, env_steps, steps_per_second, recent_return):
        if env_steps == 2 * 32:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_resumed_run_with_schedules_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    monkeypatch.setattr("jppo.training.device_loop._CHUNK_SECONDS", 0.0)
    options = {"config": SMALL(), "total_steps": 6 * 32, "num_devices": 1}
    whole = jppo.train(ObsActionReward(), hyperparams=ALL, **options)
    path = tmp_path / "run"
    part = jppo.train(ObsActionReward(), hyperparams=ALL, run_dir=path, progress=Interrupting(), **options)
    assert part.summary["status"] == "interrupted"
    settings = read_config(path)
    assert settings["hyperparams"]["vf_clip_eps"] == {"piecewise": [[0.1, 0.3], [0.5]]}
    assert config_of(settings, path)[1] == ALL
    for changed, message in (
        ({"total_steps": 12 * 32}, r"cannot change to 384, because .*gamma = linear\(0.9, 0.8\)"),
        ({"ent_coef": 0.05}, r"ent_coef is linear\(0.05, 0\) in the run, but 0.05 now"),
    ):
        with pytest.raises(ValueError, match=message):
            jppo.train(ObsActionReward(), run_dir=path, **changed)
    resumed = jppo.train(ObsActionReward(), run_dir=path)
    assert resumed.summary["policy_sha256"] == whole.summary["policy_sha256"]
    for name in ("loss/total", "hyperparams/ent_coef", "learning_rate"):
        np.testing.assert_array_equal(resumed.metrics[name], whole.metrics[name])


@pytest.mark.slow
def test_vmapped_training_over_schedules_equals_a_loop():
    agent = jppo.make_anakin(ObsActionReward(), SMALL(), total_steps=3 * 32)

    def train(start, end):
        return agent.train(jax.random.key(0), jppo.Hyperparams(learning_rate=1e-2, ent_coef=linear(start, end)))

    starts, ends = jnp.array([0.5, 0.0]), jnp.array([0.0, 0.5])
    state, metrics = jax.jit(jax.vmap(train))(starts, ends)
    alone = jax.jit(train)
    for i in range(2):
        one, expected = alone(starts[i], ends[i])
        for a, b in zip(
            jax.tree.leaves(state.train.policy_state), jax.tree.leaves(one.train.policy_state), strict=True
        ):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(metrics["hyperparams/ent_coef"][i], expected["hyperparams/ent_coef"], rtol=1e-6)


@pytest.mark.slow
def test_a_sweep_trains_schedules_of_one_kind_in_one_program(tmp_path):
    values = [0.01, linear(0.01, 0), linear(0.5, 0)]
    options = {"config": SMALL(), "total_steps": 4 * 32, "learning_rate": 1e-2, "num_devices": 1}
    messages, reporter = [], jppo.PrintReporter()
    reporter.message = messages.append
    arguments = {"seeds": [3], "ent_coef": values, "selection": "successive_halving", "sweep_dir": tmp_path / "sweep"}

    def sweep():
        return jppo.sweep(ObsActionReward(), progress=lambda _: reporter, **arguments, **options)

    result = sweep()
    assert messages[0] == "3 runs in 2 programs"
    assert messages[2].endswith("ent_coef: linear: 2 runs")
    assert [run.settings["ent_coef"] for run in result.runs] == values
    assert result.table["ent_coef"].tolist() == ["0.01", "linear(0.01, 0)", "linear(0.5, 0)"]
    assert [run.updates for run in result.runs] in ([4, 2, 4], [4, 4, 2])
    for run in result.runs[1:]:
        expected = run.settings["ent_coef"].a * np.array([1, 0.75, 0.5, 0.25])
        np.testing.assert_allclose(run.metrics["hyperparams/ent_coef"], expected[: run.updates], rtol=1e-6)
    run = next(run for run in result.runs[1:] if run.updates == 4)
    alone = jppo.train(ObsActionReward(), seed=3, ent_coef=run.settings["ent_coef"], **options)
    np.testing.assert_allclose(run.metrics["loss/total"], alone.metrics["loss/total"], rtol=1e-3, atol=1e-4)
    saved = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert saved["settings"]["ent_coef"][:2] == [0.01, {"linear": [0.01, 0.0]}]
    assert [again.status for again in sweep().runs] == [run.status for run in result.runs]
    assert messages[-1] == "0 runs in 0 programs; 3 runs already saved"
