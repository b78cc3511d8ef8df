"""Collects rollouts on the host: steps a vector of Gymnasium environments with a fixed policy, in this process."""

import contextvars
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.actors.action_selection import Act, make_action_selection
from jppo.actors.numpy_params import check_categories
from jppo.actors.rollout_evaluation import evaluate_rollout
from jppo.devices.jit import jit, make_device_put
from jppo.envs.contract import BrokenContractError, check_kept
from jppo.envs.gymnasium import HostEnvironment, HostStep
from jppo.envs.masks import lacks_legal_action
from jppo.envs.spaces import ACTION_MASK, Array, PyTree
from jppo.errors import EMPTY_MASK
from jppo.ppo.normalization import empty_moments
from jppo.ppo.policy import Network, Policy, RecurrentNetwork, make_policy
from jppo.ppo.rollout import env_keys, rollout_keys
from jppo.ppo.types import Episode, EpisodeStats, PolicyState, Rollout

_put = make_device_put()


class Fragment(NamedTuple):
    """The result of one runner's rollout, as NumPy arrays."""

    rollout: Rollout  # [T, n, ...]
    stats: EpisodeStats
    seconds: dict[str, float]  # "env" (stepping), "policy" (selecting actions) and "rollout" (everything)
    streams: np.ndarray  # [n, ...] key data of the environments' streams after the rollout


class RunnerSpec(NamedTuple):
    """The arguments of an EnvRunner that all runners of a run share. It can be sent to another process."""

    env: HostEnvironment
    network: Network | RecurrentNetwork
    action_spec: PyTree  # ActionSpec leaves; includes the policy's action bounds
    num_steps: int
    key_data: np.ndarray  # key of all environments of the run
    policy_shapes: PolicyState  # ShapeDtypeStruct leaves
    streams: np.ndarray | None = None  # [N, ...] key data of the first N streams of a resumed run
    sequence_length: int = 1  # steps between two stored carries of a recurrent network
    keep_next_obs: bool = False  # see PPOConfig.keep_next_obs
    make_evaluate: Callable[[], Callable[..., dict[str, Any]]] | None = None  # see EnvRunner.evaluate


class EnvRunner:
    """Steps n environments `num_steps` times per call, with a policy that is fixed during the call.

    Each environment draws from the key stream of its global number, as in on-device rollouts (`jppo.ppo.rollout`).
    Runners of 1, 2 or 8 environments therefore collect the same data.
    """

    def __init__(self, spec: RunnerSpec, env_index: np.ndarray) -> None:
        """Makes and resets the environments and compiles the policy.

        Args:
          env_index: [n] i32, global numbers of these environments.
        """
        num_envs = len(env_index)
        self._spec, self._programs = spec, _compile(spec, num_envs)
        key = jax.random.wrap_key_data(jnp.asarray(spec.key_data))
        reset_keys, streams = jit(env_keys)(key, jnp.asarray(env_index, jnp.int32))
        self._streams = np.asarray(jax.random.key_data(streams))
        if spec.streams is not None and env_index[0] < len(spec.streams):  # a restarted actor uses new numbers
            self._streams = spec.streams[env_index]
        seeds = np.asarray(jax.random.key_data(reset_keys))[:, -1] >> 1  # Gymnasium takes 31 bits
        self._envs = spec.env.make(seeds.tolist())
        self._obs = self._envs.reset()
        self._carry = self._start_carry = jax.tree.map(np.asarray, self._programs.policy.initial_carry(num_envs))
        self._episode = Episode.beginning(num_envs)
        self._num_envs = num_envs
        # A context without NumPy's floating-point warnings, as in XLA. It is ten times faster than np.errstate.
        self._silent = contextvars.copy_context()
        self._silent.run(np.seterr, all="ignore")

    def collect(self, policy_state: PolicyState, gamma: float) -> Fragment:
        """Steps every environment `num_steps` times and returns the rollout.

        Args:
          gamma: discount of the returns that scale rewards.
        """
        start = time.perf_counter()
        act = self._silent.run(self._programs.act, policy_state)
        policy_state = _put(policy_state)
        steps = _Steps(self._spec, self._num_envs)
        self._streams, noise = self._programs.noise(self._streams)
        self._obs, seconds = self._run(act, np.asarray(noise), policy_state, steps)
        check_categories(self._spec.env.obs_spec, steps.obs)
        rollout, stats, self._episode = self._programs.evaluate(
            policy_state,
            *(steps.rollout(), steps.unflatten(leaf[-1] for leaf in steps.obs), self._carry, steps.final_value),
            *(self._episode, jnp.float32(gamma)),
        )
        rollout = steps.rollout(**{name: np.asarray(values) for name, values in rollout.items()})
        stats = jax.tree.map(np.asarray, stats)
        seconds["rollout"] = time.perf_counter() - start
        return Fragment(rollout=rollout, stats=stats, seconds=seconds, streams=np.asarray(self._streams))

    @functools.cached_property
    def evaluate(self) -> Callable[..., dict[str, Any]]:
        """Evaluates a policy in other environments: (policy, update, before_step) -> metrics."""
        assert self._spec.make_evaluate is not None, "the run has no evaluations"
        return self._spec.make_evaluate()

    def close(self) -> None:
        """Closes the environments."""
        self._envs.close()

    def _run(
        self, act: Act, noise: np.ndarray, policy_state: PolicyState, steps: "_Steps"
    ) -> tuple[PyTree, dict[str, float]]:
        """Fills `steps`. Returns the observations after the last step, and the seconds by activity."""
        envs, silently, clock = self._envs, self._silent.run, time.perf_counter
        obs, policy_seconds, env_seconds = self._obs, 0.0, 0.0
        recurrent, masked = self._programs.policy.is_recurrent, self._programs.policy.has_mask
        length, several = self._spec.sequence_length, self._spec.env.num_agents > 1

        def record(t: int, action: PyTree, after: HostStep) -> None:
            steps.record_transition(t, action, after)
            if after.final_obs:
                self._value_truncated(t, policy_state, steps, after.obs, after.final_obs)
            if recurrent:
                self._reset_carry(steps.terminated[t] | steps.truncated[t])

        for t in range(self._spec.num_steps):
            leaves = silently(steps.record_obs, t, obs)
            if several:
                steps.active[t] = envs.active
            if masked:
                steps.check_mask(t)
            if recurrent and t % length == 0:
                steps.carries.append(self._carry)
            begin = clock()
            action, env_action, self._carry = silently(act, leaves, noise[t], self._carry)
            between = clock()
            after = envs.step(env_action)
            end = clock()
            obs = after.obs
            silently(record, t, action, after)
            policy_seconds += between - begin
            env_seconds += end - between
        silently(steps.record_obs, self._spec.num_steps, obs)
        return obs, {"policy": policy_seconds, "env": env_seconds}

    def _reset_carry(self, done: np.ndarray) -> None:
        """Sets the carry to its initial value where an episode ended, done [n] bool."""
        if done.any():
            self._carry = jax.tree.map(
                lambda leaf, start: np.where(done.reshape(-1, *[1] * (leaf.ndim - 1)), start, leaf),
                self._carry,
                self._start_carry,
            )

    def _value_truncated(
        self, t: int, policy_state: PolicyState, steps: "_Steps", obs: PyTree, final_obs: dict[int, PyTree]
    ) -> None:
        """Records the values of the final observations of the episodes that were truncated at step t."""
        cut = steps.truncated[t] & ~steps.terminated[t]
        if not cut.any():
            return
        leaves = steps.successors(obs, final_obs)
        value = self._programs.value(policy_state, steps.unflatten(leaves), self._carry)
        steps.final_value[t] = np.where(cut, np.asarray(value), 0.0)


def blank_fragment(spec: RunnerSpec, num_envs: int) -> Fragment:
    """Returns a fragment of zeros with the shapes and dtypes of a real one."""
    steps = _blank_steps(spec, num_envs, make_policy(spec.network, spec.env.obs_spec, spec.action_spec))
    values = dict.fromkeys(("log_prob", "value", "next_value"), steps.final_value)
    none = jax.tree.map(np.asarray, empty_moments())
    stats = EpisodeStats(returns=none, lengths=none, discounted=none)
    streams = np.empty((num_envs, *spec.key_data.shape), np.uint32)
    blank = Fragment(rollout=steps.rollout(**values), stats=stats, seconds={}, streams=streams)
    return jax.tree.map(np.zeros_like, blank)  # uninitialized memory may contain NaN, which jax_debug_nans refuses


def rollout_bytes(spec: RunnerSpec, num_envs: int) -> int:
    """Returns the size of a rollout of n environments in bytes, without allocating it."""
    short = blank_fragment(spec._replace(num_steps=spec.sequence_length), 1).rollout
    return sum(leaf.nbytes for leaf in jax.tree.leaves(short)) * num_envs * spec.num_steps // spec.sequence_length


class _Steps:
    """The buffers of one rollout. They are new for each rollout, because the previous ones may still be in use."""

    def __init__(self, spec: RunnerSpec, num_envs: int) -> None:
        lead = (spec.num_steps, num_envs)
        structure: Any
        specs, structure = jax.tree.flatten(spec.env.obs_spec)
        paths = jax.tree_util.tree_leaves_with_path(spec.env.obs_spec)
        self._names = [f"observation{jax.tree_util.keystr(path)}" for path, _ in paths]
        self.unflatten = structure.unflatten
        # JAX's tree functions would take longer than the rest of a small step
        self._leaves = (lambda obs: [obs]) if jax.tree_util.treedef_is_leaf(structure) else jax.tree.leaves
        # the last row holds the observations after the last step
        self.obs = [np.empty((lead[0] + 1, num_envs, *s.shape), s.dtype) for s in specs]
        self._next_obs = [np.empty((*lead, *s.shape), s.dtype) for s in specs] if spec.keep_next_obs else None
        self.action: Any = jax.tree.map(
            lambda s: np.empty((*lead, *s.policy_shape), np.float32 if s.is_box else np.int32), spec.env.action_spec
        )
        self.reward: Any = np.empty(lead, np.float32)
        self.terminated: Any = np.empty(lead, bool)
        self.truncated: Any = np.empty(lead, bool)
        self.active: Any = np.empty(lead, bool) if spec.env.num_agents > 1 else ()
        self.final_value = np.zeros(lead, np.float32)
        self.carries: list[PyTree] = []  # at the start of each sequence, leaves [n, ...]
        self._action_spec, self._obs_spec = spec.env.action_spec, spec.env.obs_spec
        self._env_name = spec.env.name

    def record_obs(self, t: int, obs: PyTree) -> list[np.ndarray]:
        """Copies the observations before step t. Returns the copies, one array [n, ...] per leaf."""
        rows = [buffer[t] for buffer in self.obs]
        for row, leaf, name in zip(rows, self._leaves(obs), self._names, strict=True):
            _copy(row, leaf, name)
        return rows

    def check_mask(self, t: int) -> None:
        """Raises BrokenContractError if the mask of some observation before step t marks no legal action."""
        mask = self.unflatten(leaf[t] for leaf in self.obs)[ACTION_MASK]
        if (empty := lacks_legal_action(self._action_spec, mask)).any():
            problem = f"action_mask marks no legal action in environment {int(empty.argmax())} at step {t} of a rollout"
            raise BrokenContractError(f"{self._env_name}: {problem}", EMPTY_MASK, check="masks")

    def record_transition(self, t: int, action: PyTree, after: HostStep) -> None:
        """Copies the action [n, ...] and the outcome of step t."""
        if isinstance(self.action, np.ndarray):
            self.action[t] = action
        else:
            for buffer, leaf in zip(jax.tree.leaves(self.action), jax.tree.leaves(action), strict=True):
                buffer[t] = leaf
        self.reward[t], self.terminated[t], self.truncated[t] = after.reward, after.terminated, after.truncated
        if self._next_obs is not None:
            for buffer, leaf in zip(self._next_obs, self.successors(after.obs, after.final_obs), strict=True):
                buffer[t] = leaf

    def successors(self, obs: PyTree, final_obs: dict[int, PyTree] | None) -> list[np.ndarray]:
        """Returns the leaves [n, ...] of the true successor observations.

        Args:
          obs: observations after the step, of a new episode where one ended.
          final_obs: last observations of the episodes that ended, by environment.
        """
        leaves = [np.empty_like(row[0]) for row in self.obs]
        for row, leaf, name in zip(leaves, self._leaves(obs), self._names, strict=True):
            _copy(row, leaf, name)
        for i, final in (final_obs or {}).items():
            for leaf, last, name in zip(leaves, jax.tree.leaves(final), self._names, strict=True):
                _copy(leaf[i : i + 1], np.asarray(last)[None], name)
        check_categories(self._obs_spec, leaves)
        return leaves

    def rollout(self, **values: Any) -> Rollout:
        """Returns the Rollout. Fields that are not in `values` and not recorded are ()."""
        return Rollout(
            obs=self.unflatten(leaf[:-1] for leaf in self.obs),
            action=self.action,
            reward=self.reward,
            terminated=self.terminated,
            truncated=self.truncated,
            next_obs=() if self._next_obs is None else self.unflatten(self._next_obs),
            carry=jax.tree.map(lambda *rows: np.stack(rows), *self.carries) if self.carries else (),
            active=self.active,
            **({"log_prob": (), "value": (), "next_value": ()} | values),  # type: ignore[arg-type]
        )


class _Programs(NamedTuple):
    """The programs of a runner, compiled for n environments."""

    noise: Any  # streams [n, ...] -> (new streams, noise of the actions [T, n, ...])
    act: Any  # policy state -> a jppo.actors.action_selection.Act
    value: Any  # policy state, obs, carry -> [n]
    evaluate: Any  # see evaluate_rollout
    policy: Policy


def _compile(spec: RunnerSpec, num_envs: int) -> _Programs:
    """Compiles all programs before the first rollout."""
    policy = make_policy(spec.network, spec.env.obs_spec, spec.action_spec)
    selection = make_action_selection(policy, num_envs)

    def noise(streams: Array) -> tuple[Array, Array]:
        next_streams, action_keys, _ = rollout_keys(jax.random.wrap_key_data(streams), spec.num_steps)
        return jax.random.key_data(next_streams), selection.sample_noise(action_keys)

    def value(policy_state: PolicyState, obs: PyTree, carry: PyTree) -> Array:
        return policy.step(policy_state, obs, carry)[1]

    def evaluate(*args: Any) -> Any:
        return evaluate_rollout(policy, *args)

    blank = _blank_steps(spec, num_envs, policy)
    obs = blank.unflatten(leaf[0] for leaf in blank.obs)
    carry = policy.initial_carry(num_envs)
    streams = jax.ShapeDtypeStruct((num_envs, *spec.key_data.shape), spec.key_data.dtype)
    noise_shape = jax.eval_shape(noise, streams)[1]
    episode, gamma = Episode.beginning(num_envs), jnp.zeros(())
    shapes = spec.policy_shapes
    step_noise = jax.ShapeDtypeStruct(noise_shape.shape[1:], noise_shape.dtype)
    return _Programs(
        noise=jit(noise).lower(streams).compile(),
        act=selection.compile(shapes, obs, step_noise),
        value=jit(value).lower(shapes, obs, carry).compile(),
        evaluate=jit(evaluate).lower(shapes, blank.rollout(), obs, carry, blank.final_value, episode, gamma).compile(),
        policy=policy,
    )


def _blank_steps(spec: RunnerSpec, num_envs: int, policy: Policy) -> _Steps:
    """Returns buffers with the shapes and dtypes of a filled rollout."""
    steps = _Steps(spec, num_envs)
    if policy.is_recurrent:
        carry = jax.tree.map(np.asarray, policy.initial_carry(num_envs))
        steps.carries = [carry] * (spec.num_steps // spec.sequence_length)
    return steps


def _copy(row: np.ndarray, leaf: Any, name: str) -> None:
    """Copies an observation leaf. Raises BrokenContractError if integers do not keep their values, such as 2**32."""
    row[...] = leaf
    if row.dtype.kind in "iu" and leaf.dtype != row.dtype:
        check_kept(name, leaf, row)
