"""The trained policy with a NumPy interface."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jppo.config.checks import check_seed
from jppo.config.run import MAX_FRAMES
from jppo.config.words import refuse_attribute
from jppo.devices.jit import jit
from jppo.envs.masks import lacks_legal_action
from jppo.envs.spaces import ACTION_MASK, Array, ObsSpec, PyTree
from jppo.errors import EMPTY_MASK, Refused
from jppo.ppo.policy import Policy, act, make_policy, reset_carry
from jppo.ppo.types import PolicyState, derive_key
from jppo.runs.display import DisplayedResult, Picture


class TrainedPolicy(DisplayedResult):
    """Selects actions for NumPy observations.

    It can be pickled, for example for `multiprocessing`, if its network can be pickled.

    Attributes:
      policy: the network with its observation preprocessing.
      state: the network's parameters and the observation statistics.
      obs_spec, action_spec: the environment's spaces.
      env: the environment of the run; None if the policy was made without one, or is a copy.
    """

    def __init__(self, policy: Policy, state: PolicyState, env: Any = None) -> None:
        self.policy, self.state, self.env = policy, state, env
        self.obs_spec, self.action_spec = policy.obs_spec, policy.action_spec
        self._key: Array | None = None  # of the samples without a seed; made at the first one, because it takes 0.1 s

        def select_action(
            state: PolicyState, obs: PyTree, key: Array, carry: PyTree, start: Array, sampled: bool
        ) -> tuple[PyTree, PyTree]:
            chosen = act(policy, state, obs, key if sampled else None, reset_carry(policy, carry, start))
            return chosen.env_action, chosen.carry

        self._carry_like = jax.eval_shape(lambda: policy.initial_carry(1))
        self._act = jit(select_action, static_argnames="sampled")
        self._value = jit(
            lambda state, obs, carry, start: policy.step(state, obs, reset_carry(policy, carry, start))[1]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes pickle and `copy` use the network, the spaces and the parameters. The copy has no environment."""
        return _restore, (self.policy.network, self.obs_spec, self.action_spec, jax.device_get(self.state))

    @property
    def _displayed(self) -> dict[str, Any]:
        sizes = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        return {"observation": self.obs_spec, "action": self.action_spec, "num_parameters": sizes}

    def act(
        self,
        obs: Any,
        state: PyTree = None,
        episode_start: Any = None,
        *,
        sampled: bool = False,
        seed: int | None = None,
    ) -> Any:
        """Returns actions for the environment: the most likely ones, or samples.

        A recurrent policy returns (actions, state), like `predict` of Stable-Baselines3's recurrent policies: pass the
        state to the next call.

            state = None
            action, state = policy.act(obs, state)

        Args:
          obs: one observation [*obs] or a batch [B, *obs]; a pytree if the environment's observations are. A dict may
            lack the parts that only the critic sees (`PPOConfig.actor_obs`).
          state: of a recurrent policy, from the call before; None at the start of an episode.
          episode_start: of a recurrent policy, [B] bool: True where an episode starts, which resets that row's state.
          sampled: sample from the policy's distribution.
          seed: seed of the samples; without it, consecutive calls give different samples.

        Raises:
          ValueError: the observation does not have the environment's structure or shape, its `action_mask` marks no
            legal action, another argument is invalid, or the policy is not recurrent and a state was passed.
        """
        obs = complete_obs(self.obs_spec, actor_leaves(self.policy), obs)
        batch, single, carry, start = as_arguments(self.obs_spec, self._carry_like, obs, state, episode_start)
        if (row := row_without_legal_action(self.policy, batch)) is not None:
            raise Refused(f"action_mask marks no legal action in row {row} of the observations; {EMPTY_MASK}")
        if seed is None:
            if self._key is None:
                self._key = derive_key(jax.random.key(0), "act without a seed")
            self._key, key = jax.random.split(self._key)
        else:
            key = derive_key(jax.random.key(check_seed(seed)), "act")
        actions, carry = self._act(self.state, batch, key, carry, start, sampled=sampled)
        actions = jax.tree.map(lambda leaf: np.asarray(leaf)[0] if single else np.asarray(leaf), actions)
        return (actions, jax.tree.map(np.asarray, carry)) if self.policy.is_recurrent else actions

    def value(self, obs: Any, state: PyTree = None) -> np.ndarray:
        """Returns the value estimates V(obs), [] or [B] f32, in units of the (scaled) training reward.

        Args:
          state: of a recurrent policy, see `act`.

        Raises:
          ValueError: the observation does not have the environment's structure or shape, or the policy is not recurrent
            and a state was passed.
        """
        batch, single, carry, start = as_arguments(self.obs_spec, self._carry_like, obs, state)
        values = np.asarray(self._value(self.state, batch, carry, start))
        return values[0] if single else values

    def play(self, env: Any = None, *, seed: int = 0, sampled: bool = False, max_steps: int = MAX_FRAMES) -> Picture:
        """Plays one episode and returns it as an animation, which a notebook shows.

            policy.play()                  # in a notebook
            policy.play().save("play.gif")

        Args:
          env: another environment with the same spaces; default: the environment of the run.
          seed, sampled, max_steps: see `jppo.play`.

        Raises:
          ValueError: see `jppo.play`.
        """
        import jppo  # here, because jppo.play imports this module

        run, policy = (self, None) if env is None else (env, self)
        return jppo.play(run, policy, seed=seed, sampled=sampled, max_steps=max_steps)


TrainedPolicy.__getattr__ = refuse_attribute  # type: ignore[attr-defined]  # in the class, it would hide typos from mypy


def _restore(network: Any, obs_spec: PyTree, action_spec: PyTree, state: PolicyState) -> TrainedPolicy:
    """Returns the copy of a policy."""
    return TrainedPolicy(make_policy(network, obs_spec, action_spec), jax.device_put(state))


def as_arguments(
    obs_spec: PyTree, carry_like: PyTree, obs: Any, state: PyTree, episode_start: Any = None
) -> tuple[PyTree, bool, PyTree, np.ndarray]:
    """Checks and converts the arguments of `TrainedPolicy.act` or `ExportedPolicy.act`.

    Args:
      carry_like: shapes and dtypes of a carry, leaves [B, ...]; () if the policy is not recurrent.

    Returns:
      the observations [B, *obs], whether `obs` is one observation without B, the carry before the step, and the rows in
      which an episode starts, [B] bool. The carry is zero without a state; all of its rows start.

    Raises:
      ValueError: an argument has another structure, shape or dtype, or a policy that is not recurrent gets a state.
    """
    from jppo.actors.numpy_policy.spaces import as_batch, starting_rows  # training on the device does not need it

    specs, structure = jax.tree.flatten(obs_spec)
    leaves, single = as_batch(_to_arrays(obs_spec, obs), [spec.shape for spec in specs])
    batch, size = jax.tree.unflatten(structure, leaves), len(leaves[0])
    if not jax.tree.leaves(carry_like) and (state is not None or episode_start is not None):
        raise Refused("this policy is not recurrent: call it without state and episode_start")
    if state is None:
        carry = jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape[1:]), leaf.dtype), carry_like)
    else:
        carry = _check_state(state, carry_like, size)
    return batch, single, carry, starting_rows(episode_start, size) | (state is None)


def _check_state(state: PyTree, like: PyTree, size: int) -> PyTree:
    """Returns a caller's state of a recurrent policy in the policy's dtypes. A list may replace a tuple.

    Args:
      like: shapes and dtypes of a carry, leaves [B, ...].
      size: number of observations.

    Raises:
      ValueError: the state has other shapes.
    """
    state = tuple(state) if isinstance(state, list) and isinstance(like, tuple) else state
    structure: Any = jax.tree.structure(like)
    wanted = [(size, *leaf.shape[1:]) for leaf in jax.tree.leaves(like)]
    found = [np.shape(leaf) for leaf in jax.tree.leaves(state)]
    if jax.tree.structure(state) != structure or found != wanted:
        raise Refused(
            f"state has arrays of shapes {found}; for {size} observations, this policy needs {wanted}, as the call "
            "before returned them"
        )
    return jax.tree.map(lambda leaf, own: np.asarray(leaf, own.dtype), state, like)


def row_without_legal_action(policy: Policy, obs: PyTree, rows: np.ndarray | bool = True) -> int | None:
    """Returns the first of these rows of observations [B] whose mask marks no legal action; None if all have one.

    Args:
      rows: [B] bool; True for all.
    """
    if not policy.has_mask:
        return None
    empty = lacks_legal_action(policy.action_spec, np.asarray(obs[ACTION_MASK])) & rows
    return int(np.argmax(empty)) if empty.any() else None


def actor_leaves(policy: Policy) -> tuple[str, ...]:
    """Returns the names of the observation's parts that the actor sees; () if it sees all."""
    names: tuple[str, ...] = getattr(policy.network, "actor_obs", ())
    return names


def complete_obs(obs_spec: Any, seen: Collection[str], obs: Any) -> Any:
    """Returns an observation, or a batch, with zeros for missing parts that the actor does not see.

    Args:
      seen: names of the parts that it sees; empty for all.
    """
    if not seen or not isinstance(obs, dict) or not set(obs) >= {*seen}:
        return obs
    shown = next(iter(seen))
    leaf = _to_arrays({shown: obs_spec[shown]}, {shown: obs[shown]})[0].shape
    lead = leaf[: max(0, len(leaf) - len(jax.tree.leaves(obs_spec[shown])[0].shape))]
    missing = set(obs_spec) - set(obs) - {ACTION_MASK}
    return obs | {name: jax.tree.map(lambda spec: _blank(spec, lead), obs_spec[name]) for name in missing}


def _blank(spec: ObsSpec, lead: tuple[int, ...]) -> np.ndarray:
    """Returns an observation that its space has: zeros or first categories."""
    return np.zeros((*lead, *spec.shape)) + np.reshape(spec.start, spec.shape if spec.nvec else ())


def _to_arrays(obs_spec: PyTree, obs: Any) -> list[np.ndarray]:
    """Returns the leaves of an observation as arrays in the dtypes of their specs.

    Raises ValueError if the structure differs from the specs, or a leaf is not an array of numbers.
    """
    tree: Any = jax.tree.structure(obs_spec)  # its class has no type annotations
    try:
        leaves = tree.flatten_up_to(_as_dicts(obs_spec, obs))
    except ValueError:
        leaves = [None]
    if any(leaf is None or isinstance(leaf, dict) for leaf in leaves):
        raise Refused(f"the observation consists of {_name_leaves(obs)}; the policy takes {_name_leaves(obs_spec)}")
    from jppo.actors.numpy_params import cast_leaves  # training on the device does not need it

    return cast_leaves(obs_spec, leaves)


def _as_dicts(obs_spec: PyTree, obs: Any) -> Any:
    """Returns an observation with a dict in place of each OrderedDict, which JAX treats as another structure."""
    if type(obs_spec) is dict and isinstance(obs, dict):
        return {name: _as_dicts(obs_spec.get(name), part) for name, part in obs.items()}
    if type(obs_spec) is type(obs) is tuple and len(obs_spec) == len(obs):
        return tuple(map(_as_dicts, obs_spec, obs))
    return obs


def _name_leaves(obs: Any) -> str:
    """Returns the names of an observation's arrays, e.g. "obs['position'], obs['action_mask']"."""
    paths = jax.tree_util.tree_leaves_with_path(obs, is_leaf=lambda node: isinstance(node, list))
    return ", ".join(f"obs{jax.tree_util.keystr(path)}" if path else "one array" for path, _ in paths) or "nothing"
