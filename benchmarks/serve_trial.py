"""Runs jppo with one change for trials.py; see serving.py.

python serve_trial.py CHANGE ENV NUM_ENVS NUM_STEPS UPDATES
"""

import sys
from typing import Any

import jax
import optax
from fused_mlp import FusedActorCritic
from serving import serve

import jppo
from jppo import kernels
from jppo.envs import make_env
from jppo.ppo import networks


def _unroll(module: str, times: int) -> dict[str, Any]:
    """Unrolls the scans over functions that a module of jppo defines."""
    scan = jax.lax.scan

    def unrolled(function: Any, *args: Any, **options: Any) -> Any:
        ours = getattr(function, "__module__", None) == module
        return scan(function, *args, **options | ({"unroll": times} if ours else {}))

    jax.lax.scan = unrolled
    return {}


def _adam_of_arrays() -> dict[str, Any]:
    """Uses optax's Adam, which keeps the moments of each array separately."""
    return {"optimizer": lambda hyperparams: optax.scale_by_adam(eps=hyperparams.adam_eps)}


def _plain_products() -> dict[str, Any]:
    """Disables all tuned kernels."""
    kernels.ENABLED = False
    return {}


def main(change: str, env: str, num_envs: int, num_steps: int, updates: int) -> None:
    config = jppo.PPOConfig(num_envs=num_envs, num_steps=num_steps)
    changed: dict[str, Any] = {}
    if change == "unroll_minibatches":
        changed = _unroll("jppo.ppo.learner", config.num_minibatches)
    elif change.startswith("unroll"):
        changed = _unroll("jppo.ppo.rollout", int(change.removeprefix("unroll")))
    elif change == "adam_of_arrays":
        changed = _adam_of_arrays()
    elif change == "plain_products":
        changed = _plain_products()
    elif change == "pallas":
        made = make_env(env)
        changed = {"network": FusedActorCritic(networks.make_network(config, made.obs_spec, made.action_spec))}
    elif change != "none":
        raise SystemExit(f"unknown change {change!r}")
    agent = jppo.make_anakin(env, config, total_steps=updates * config.batch_size, **changed)
    serve(agent.train, jax.random.key(0), jppo.jit)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
