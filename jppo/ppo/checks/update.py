"""Validates a user's loss, advantages and optimizer by tracing one update, before anything runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.envs.spaces import Array, PyTree
from jppo.errors import Refused, describe_error
from jppo.ppo.checks.loss import as_pair, check_advantages, check_bonus, check_loss, check_loss_init
from jppo.ppo.checks.observations import check_obs
from jppo.ppo.losses import Advantages, LossModule
from jppo.ppo.minibatches import Optimizer
from jppo.ppo.policy import Policy, act
from jppo.ppo.rollout import episode_stats
from jppo.ppo.types import Apply, Episode, Rollout

_NO_NEXT_OBS = "next_obs is empty; set PPOConfig(keep_next_obs=True) to store the next observations"


def check_update(make_learner: Callable[[PPOConfig], Any], policy: Policy, config: PPOConfig, num_agents: int) -> None:
    """Traces one update with checked forms of loss, advantages and optimizer; computes nothing.

    Args:
      make_learner: config -> a `Learner`.

    Raises:
      ValueError: a part does not fit; or it needs the next observations, which are not stored.
    """
    try:
        _trace_update(make_learner(config), policy, config, num_agents)
    except Exception as error:
        if config.keep_next_obs:
            raise
        wider = config.replace(keep_next_obs=True)
        try:
            _trace_update(make_learner(wider), policy, wider, num_agents)
        except Exception:
            raise error from None
        raise Refused(_NO_NEXT_OBS) from error


def _trace_update(learner: Any, policy: Policy, config: PPOConfig, num_agents: int) -> None:
    """Traces `init` and `update` of a learner for a rollout of zeros."""
    num_steps, num_envs = config.num_steps, config.num_envs

    def zeros(spec: Any, *lead: int) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), spec)

    def update(key: Array) -> Any:
        state = learner.init(key, zeros(policy.obs_spec, num_envs), Hyperparams(), 1)
        carry = policy.initial_carry(num_envs)
        chosen = act(policy, state.policy_state, zeros(policy.obs_spec, num_envs), key, carry)
        done = jnp.zeros((num_steps, num_envs), bool)
        value = done.astype(jnp.float32)
        obs = zeros(policy.obs_spec, num_steps, num_envs)
        rollout = Rollout(
            obs=obs,
            action=zeros(chosen.action, num_steps),
            log_prob=value,
            value=value,
            next_value=value,
            reward=value,
            terminated=done,
            truncated=done,
            next_obs=obs if config.keep_next_obs else (),
            carry=zeros(carry, num_steps // config.steps_per_sequence),
            active=done if num_agents > 1 else (),
        )
        progress = Episode(returns=value, lengths=value.astype(jnp.int32), discounted=value)
        return state, learner.update(state, rollout, episode_stats(progress, done, rollout.active))

    if not all(hasattr(learner, name) for name in ("init", "update")):
        raise Refused(f"learner returned {type(learner).__name__}; it must return a jppo.Learner")
    before, returned = jax.eval_shape(update, jax.random.key(0))
    after, metrics = as_pair("the learner's update", returned, "(state, metrics)")
    if (needed := _describe(before)) != (found := _describe(after)):
        raise Refused(f"the learner's update returned the state {found}; it must keep shapes and dtypes, {needed}")
    if not isinstance(metrics, dict) or "finite" not in metrics or any(x.shape for x in jax.tree.leaves(metrics)):
        raise Refused('the learner\'s update must return a dict of scalars as metrics, among them "finite", a bool')


def checked_loss(loss: LossModule, policy: Policy, config: PPOConfig) -> LossModule:
    """Returns a loss that checks its results, and the observations that it passes to the network."""

    def init(key: Array, obs: PyTree) -> tuple[PyTree, PyTree]:
        return check_loss_init(loss.init(key, obs))

    def apply(params: PyTree, state: PyTree, apply_network: Apply, batch: Any, *arguments: Any) -> Any:
        called: list[bool] = []
        network = _checked_apply(apply_network, policy, batch.value.shape if policy.is_recurrent else None, called)
        total, metrics = check_loss(loss.apply(params, state, network, batch, *arguments))
        if not called:
            raise Refused("the loss never calls apply, so the network would not learn")
        if config.kl_control != "none" and "policy/approx_kl" not in metrics:
            raise Refused(f'kl_control = "{config.kl_control}" needs a loss that returns the metric policy/approx_kl')
        return total, metrics

    def reward(params: PyTree, state: PyTree, rollout: Rollout, axis_name: str | None) -> tuple[Array, PyTree]:
        assert loss.reward is not None
        return check_bonus(loss.reward(params, state, rollout, axis_name), rollout.reward, state)

    return LossModule(init=init, apply=apply, reward=reward)


def checked_advantages(advantages: Advantages, policy: Policy) -> Advantages:
    """Returns advantages that check their results, and the observations that they pass to the network."""

    def checked(apply: Apply, rollout: Rollout, hyperparams: Hyperparams, config: PPOConfig) -> tuple[Array, Array]:
        network = _checked_apply(apply, policy, rollout.reward.shape, [])
        return check_advantages(advantages(network, rollout, hyperparams, config), rollout.reward)

    return checked


def _checked_apply(apply: Apply, policy: Policy, rows: tuple[int, ...] | None, called: list[bool]) -> Apply:
    """Returns `apply` with a check of its observations [*rows, *obs]; rows is None for any number of rows [B].

    Each call appends True to `called`.
    """

    def checked(obs: PyTree) -> tuple[Any, Array]:
        called.append(True)
        if isinstance(obs, tuple) and not obs:
            raise Refused(_NO_NEXT_OBS)
        check_obs(policy.obs_spec, obs, rows)
        return apply(obs)

    return checked


def checked_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer that names itself in errors, and checks its updates and its state."""

    def failed(error: Exception) -> Refused:
        return Refused(
            f"optimizer failed ({describe_error(error)}); it must be a function of the hyperparameters that returns an "
            "optax transformation, such as lambda h: optax.adam(h.learning_rate); those that need the loss's value, "
            "such as optax.lbfgs, do not fit"
        )

    def checked(hyperparams: Hyperparams) -> optax.GradientTransformation:
        def init(params: PyTree) -> PyTree:
            try:
                return optimizer(hyperparams).init(params)
            except Exception as error:
                raise failed(error) from error

        def update(gradient: PyTree, before: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
            try:
                updates, state = optimizer(hyperparams).update(gradient, before, params)
            except Exception as error:
                raise failed(error) from error
            is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(updates)]
            shapes = [list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (updates, params)]
            if shapes[0] != shapes[1] or not all(is_float):
                raise Refused(f"optimizer returned updates {_describe(updates)} for parameters {_describe(params)}")
            if (now := _describe(state)) != (was := _describe(before)):
                raise Refused(f"optimizer changed its state from {was} to {now}")
            return updates, state

        return optax.GradientTransformation(init, update)

    return checked


def _describe(tree: PyTree) -> str:
    leaves = jax.tree.leaves_with_path(tree)
    return ", ".join(
        f"{jax.tree_util.keystr(path)} {getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"
        for path, x in leaves
    )
