"""Tests action distributions of several components, masks, and action spaces beyond Discrete and Box."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from gymnasium import spaces
from gymnax.environments import spaces as gymnax_spaces
from host_probes import Compound
from probes import Masked, Probe

import jppo
from jppo.envs.action_spaces import action_spec_of
from jppo.envs.spaces import ActionSpec, ObsSpec, to_env_action
from jppo.networks.distributions import Categorical, DiagGaussian, Joint, MultiCategorical
from jppo.ppo.checks.network import check_network
from jppo.ppo.policy import act, make_policy
from jppo.ppo.types import PolicyState

NVEC = (3, 2, 5)
SAMPLES = 20_000


def split(flat, nvec=NVEC):
    return np.split(np.asarray(flat, float), np.cumsum(nvec)[:-1], axis=-1)


@pytest.fixture
def flat_logits():
    return np.random.default_rng(0).normal(0.0, 2.0, (4, sum(NVEC))).astype(np.float32)


@pytest.mark.parametrize("nvec", [NVEC, (4, 4), (1, 3), (2, 2, 2, 2)], ids=str)
@pytest.mark.slow
def test_multi_categorical_equals_a_loop_over_components(nvec):
    rng = np.random.default_rng(1)
    logits = rng.normal(0.0, 2.0, (6, sum(nvec))).astype(np.float32)
    action = rng.integers(nvec, size=(6, len(nvec)))
    log_prob, entropy, mode = np.zeros(6), np.zeros(6), np.zeros((6, len(nvec)), int)
    for row in range(6):
        for k, part in enumerate(split(logits[row], nvec)):
            probs = scipy.special.softmax(part)
            log_prob[row] += np.log(probs[action[row, k]])
            entropy[row] += scipy.stats.entropy(probs)
            mode[row, k] = probs.argmax()
    distribution = MultiCategorical.from_flat(jnp.asarray(logits), nvec)
    np.testing.assert_allclose(distribution.log_prob(jnp.asarray(action)), log_prob, rtol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(distribution.mode(), mode)


def test_multi_categorical_samples_have_the_probabilities_of_each_component(flat_logits):
    distribution = MultiCategorical.from_flat(jnp.asarray(flat_logits), NVEC)
    keys = jax.random.split(jax.random.key(0), SAMPLES)
    samples = np.asarray(jax.jit(jax.vmap(lambda key: distribution.sample(seed=key)))(keys))
    assert samples.shape == (SAMPLES, 4, 3)
    assert samples.dtype == np.int32
    assert (samples < np.array(NVEC)).all()
    for row in range(4):
        probs = [scipy.special.softmax(part) for part in split(flat_logits[row])]
        joint = np.einsum("a,b,c->abc", *probs).ravel()
        counts = np.bincount(np.ravel_multi_index(samples[:, row].T, NVEC), minlength=joint.size)
        error = np.sqrt(SAMPLES * joint * (1.0 - joint)) + 1.0
        assert (np.abs(counts - SAMPLES * joint) < 4.5 * error).all()


@pytest.mark.slow
def test_joint_equals_the_sum_over_its_leaves(flat_logits):
    rng = np.random.default_rng(2)
    mean, log_std, move = (rng.normal(size=(4, 2)).astype(np.float32) for _ in range(3))
    logits = flat_logits[:, :6]
    joint = Joint(
        {
            "turn": Categorical(jnp.asarray(logits)),
            "arm": (
                DiagGaussian(jnp.asarray(mean), jnp.asarray(log_std)),
                MultiCategorical.from_flat(jnp.asarray(flat_logits), NVEC),
            ),
        }
    )
    turn, buttons = rng.integers(6, size=4), rng.integers(NVEC, size=(4, 3))
    log_prob, entropy = np.zeros(4), np.zeros(4)
    for row in range(4):
        normal = scipy.stats.norm(mean[row].astype(float), np.exp(log_std[row].astype(float)))
        log_prob[row] += (
            scipy.special.log_softmax(logits[row].astype(float))[turn[row]] + normal.logpdf(move[row]).sum()
        )
        entropy[row] += scipy.stats.entropy(scipy.special.softmax(logits[row].astype(float))) + normal.entropy().sum()
        for k, part in enumerate(split(flat_logits[row])):
            log_prob[row] += scipy.special.log_softmax(part)[buttons[row, k]]
            entropy[row] += scipy.stats.entropy(scipy.special.softmax(part))
    action = {"turn": jnp.asarray(turn), "arm": (jnp.asarray(move), jnp.asarray(buttons))}
    np.testing.assert_allclose(joint.log_prob(action), log_prob, rtol=1e-5)
    np.testing.assert_allclose(joint.entropy(), entropy, rtol=1e-5)
    mode = joint.mode()
    np.testing.assert_array_equal(mode["turn"], logits.argmax(-1))
    np.testing.assert_array_equal(mode["arm"][0], mean)
    sample = joint.sample(seed=jax.random.key(1))
    assert jax.tree.structure(sample) == jax.tree.structure(action)


def test_the_leaves_of_a_joint_sample_are_independent():
    joint = Joint((Categorical(jnp.zeros((SAMPLES, 3))), Categorical(jnp.zeros((SAMPLES, 3)))))
    first, second = map(np.asarray, joint.sample(seed=jax.random.key(2)))
    assert scipy.stats.chisquare(np.bincount(3 * first + second, minlength=9)).pvalue > 1e-3


@pytest.mark.slow
def test_a_mask_of_1000_actions_leaves_probability_to_legal_ones_only():
    rng = np.random.default_rng(3)
    logits = rng.normal(0.0, 3.0, (50, 1000)).astype(np.float32)
    legal = rng.uniform(size=logits.shape) < 0.02
    legal[:, 7] = True
    legal[0] = np.arange(1000) == 999  # one legal action
    masked = Categorical(jnp.asarray(logits)).mask(jnp.asarray(legal))
    probs = np.exp(np.stack([masked.log_prob(jnp.full(50, a)) for a in range(1000)], -1))
    np.testing.assert_array_equal(probs[~legal], 0.0)
    expected = scipy.special.softmax(np.where(legal, logits.astype(float), -np.inf), axis=-1)
    np.testing.assert_allclose(probs, expected, rtol=1e-4, atol=1e-7)
    entropy = [
        scipy.stats.entropy(scipy.special.softmax(row[ok].astype(float))) for row, ok in zip(logits, legal, strict=True)
    ]
    np.testing.assert_allclose(masked.entropy(), entropy, rtol=1e-4, atol=1e-6)
    samples = jax.jit(jax.vmap(lambda key: masked.sample(seed=key)))(jax.random.split(jax.random.key(0), 500))
    assert legal[np.arange(50), np.asarray(samples)].all()
    assert legal[np.arange(50), np.asarray(masked.mode())].all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_gradients_of_masked_distributions_are_finite_and_zero_for_illegal_categories(flat_logits, scale):
    legal = jnp.asarray([[[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 1, 0, 0, 1]]] * 4, bool)
    action = jnp.asarray([[2, 1, 4]] * 4)

    def loss(flat):
        masked = MultiCategorical.from_flat(flat, NVEC).mask(legal)
        return masked.log_prob(action).sum() + masked.entropy().sum()

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(scale * flat_logits)))
    assert np.isfinite(gradient).all()
    exists = np.concatenate([legal[0, k, :n] for k, n in enumerate(NVEC)])
    np.testing.assert_array_equal(gradient[:, ~exists], 0.0)
    if scale == 1.0:
        assert (np.abs(gradient[:, exists]).sum(axis=-1) > 0.0).all()


SMALL = jppo.PPOConfig(num_envs=4, num_steps=8, num_minibatches=2, hidden_sizes=(8,))


class CompoundOnDevice(Probe):
    """Has nested actions. The reward is 1 in steps whose actions are all in the space, otherwise 0."""

    def action_space(self, params=None):
        return Compound.action_space

    def reward(self, state, action):
        move, grid = action["arm"]
        low = jnp.asarray([[1, 0], [0, 7]])
        inside = [
            (action["turn"] >= 4) & (action["turn"] <= 6),
            ((move >= -2.0) & (move <= 1.0)).all(),
            ((grid >= low) & (grid < low + jnp.asarray([[2, 3], [4, 1]]))).all(),
            ((action["keys"] >= 0) & (action["keys"] <= 1)).all(),
        ]
        return jnp.stack(inside).all().astype(jnp.float32)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 2, 5], start=[1, 0, -4]),
        spaces.MultiDiscrete([[3, 2], [1, 4]]),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1.0, 3.0, (2, 2)),
        spaces.Box(np.array([-3, 0]), np.array([4, 9]), dtype=np.int16),
        spaces.Box(0, 255, (), np.uint8),
        spaces.Box(-128, 127, (2,), np.int8),
        spaces.Box(0, 1, (2,), np.bool_),
    ],
    ids=str,
)
def test_every_sample_is_an_action_of_the_space(space):
    spec = action_spec_of("test", space)
    rng, lead = np.random.default_rng(0), (5, 40)
    sample = rng.normal(size=(*lead, *spec.policy_shape), scale=2.0).astype(np.float32)
    if not spec.is_box:
        sample = rng.integers(spec.num_actions or spec.nvec, size=sample.shape)
    actions = np.asarray(to_env_action(spec, jnp.asarray(sample))).astype(space.dtype)
    assert all(space.contains(np.asarray(action)) for row in actions for action in row)
    if not spec.is_box:
        assert len(np.unique(actions.reshape(200, -1), axis=0)) > 3


@pytest.mark.parametrize(
    ("low", "high", "shape", "dtype"),
    [
        (0, 3, (0,), jnp.int32),
        (3, 0, (2,), jnp.int32),
        (-np.inf, np.inf, (2,), jnp.int32),
        (0, 1024, (2,), jnp.int32),
        (2**40, 2**40 + 3, (2,), np.int64),
        (-1, 1, (2,), jnp.bfloat16),
    ],
)
def test_other_boxes_are_refused(low, high, shape, dtype):
    with pytest.raises(ValueError, match=r"^test: action space .* is not supported; .* at most 1,024 integers"):
        action_spec_of("test", gymnax_spaces.Box(low, high, shape, dtype))


def test_a_box_of_integers_has_the_integers_between_its_bounds():
    spec = action_spec_of("test", gymnax_spaces.Box(0.5, 3.5, (2,), jnp.int32))
    assert spec == ActionSpec((2,), "int32", nvec=(3, 3), start=(1, 1))


@pytest.mark.slow
def test_nested_actions_train_on_the_device():
    result = jppo.train(CompoundOnDevice(), config=SMALL, total_steps=320, progress="none")
    np.testing.assert_array_equal(result.metrics["episode/return_mean"], 1.0)
    assert all(spec.bounds == "clip" for spec in jax.tree.leaves(result.policy.action_spec))


@pytest.mark.slow
def test_nested_actions_integers_and_scalars_train_on_the_host(tmp_path):
    result = jppo.train(
        Compound, config=SMALL.replace(normalize_obs=True), total_steps=160, num_actors=0, run_dir=tmp_path / "run"
    )
    assert {name: (spec.shape, spec.dtype) for name, spec in result.policy.obs_spec.items()} == {
        "image": ((2, 2), "uint8"),
        "numbers": ((2,), "int32"),
        "bits": ((2,), "int8"),
        "clock": ((), "float32"),
    }
    assert np.isfinite(result.metrics["loss/total"]).all()
    evaluation = jppo.evaluate(result, num_episodes=3)
    assert evaluation.finished.all()
    policy = jppo.load_policy(tmp_path / "run", env="host_probes:Compound")
    obs = Compound().reset(seed=0)[0]
    action = policy.act(obs)
    assert action["turn"].shape == ()
    assert action["arm"][1].shape == (2, 2)
    assert policy.act(jax.tree.map(lambda x: np.stack([x] * 3), obs), sampled=True)["keys"].shape == (3, 3)


@pytest.mark.slow
def test_check_env_draws_valid_nested_actions():
    for env in (Compound, CompoundOnDevice()):
        report = jppo.check_env(env, steps=50)
        assert not [check for check in report.checks if check.status == "fail"], report


class Flat:
    """A network without parameters that returns the distribution of a function of the batch size."""

    def __init__(self, make):
        self.make = make

    def init(self, key, obs):
        return jnp.zeros(())

    def apply(self, params, obs):
        batch = len(jax.tree.leaves(obs)[0])
        return self.make(batch), jnp.zeros(batch) + params


BUTTONS = ActionSpec((2,), "int32", nvec=(4, 2))
ONE = ObsSpec((1,), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_categories_that_a_component_does_not_have_are_never_taken(nested):
    def make(batch):
        buttons = MultiCategorical(jnp.zeros((batch, 2, 4)))
        return Joint((Joint({"buttons": buttons}), Categorical(jnp.zeros((batch, 3))))) if nested else buttons

    spec = ({"buttons": BUTTONS}, ActionSpec((), "int32", num_actions=3)) if nested else BUTTONS
    network = Flat(make)
    check_network(network, ONE, spec)
    policy = make_policy(network, ONE, spec)
    state = PolicyState(params=jnp.zeros(()), obs_stats=())
    sample = act(policy, state, jnp.zeros((200, 1)), jax.random.key(0)).action
    buttons = sample[0]["buttons"] if nested else sample
    assert (buttons.max(axis=0) == jnp.asarray([3, 1])).all()
    entropy = policy.step(state, jnp.zeros((1, 1)))[0].entropy()
    np.testing.assert_allclose(entropy, np.log(4 * 2 * (3 if nested else 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda batch: Categorical(jnp.zeros((batch, 4))), "the network has 4 logits; the environment has 3 actions"),
        (
            lambda batch: MultiCategorical(jnp.zeros((batch, 2, 5))),
            r"has logits \[2, 5\]; the MultiDiscrete action needs",
        ),
    ],
)
def test_the_leaves_of_a_joint_must_have_the_categories_of_the_action(leaf, message):
    spec = {"a": BUTTONS if "2, 5" in message else ActionSpec((), "int32", num_actions=3)}
    with pytest.raises(ValueError, match=message):
        check_network(Flat(lambda batch: Joint({"a": leaf(batch)})), ONE, spec)


@pytest.mark.parametrize("option", ["actor_obs", "critic_obs"])
def test_an_own_network_does_not_take_names_of_observation_leaves(option):
    config = SMALL.replace(**{option: ("time",)})
    network = Flat(lambda batch: Categorical(jnp.zeros((batch, 6))))
    with pytest.raises(ValueError, match=r"actor_obs and critic_obs describe jppo's own network; .* in Flat.apply"):
        jppo.make_anakin(Masked(), config, network=network)
