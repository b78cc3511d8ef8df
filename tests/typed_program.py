"""A program of a user, for the type checker. tests/test_typing.py does not run it."""

from typing import Any

import jax
import numpy as np

import jppo


def stop_when_solved(event: jppo.CallbackEvent) -> None:
    event.log("my/steps", float(event.steps))
    if event.return_mean > 475.0:
        event.stop("solved")


@jppo.mean_over_rows
def loss(
    apply: Any, batch: Any, hyperparams: jppo.Hyperparams, config: jppo.PPOConfig, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jppo.ppo_loss(apply, batch, hyperparams, config, key)


config = jppo.PPOConfig(num_envs=8, hidden_sizes=(32, 32)).replace(num_steps=64)
hyperparams = jppo.Hyperparams(learning_rate=jppo.schedules.linear(1e-3, 0.0))
result: jppo.Result = jppo.train(
    "CartPole-v1",
    total_steps=10_000,
    config=config,
    hyperparams=hyperparams,
    loss=loss,
    callback=stop_when_solved,
    progress=jppo.NullReporter(),
    run=jppo.RunConfig(max_checkpoints=1),
)
returns: np.ndarray = result.metrics["episode/return_mean"]
policy: jppo.TrainedPolicy = result.policy
action = policy.act([0.0, 0.0, 0.0, 0.0])
evaluation: jppo.Evaluation = jppo.evaluate(result, num_episodes=2)
mean = float(evaluation.returns.mean())
report = jppo.check_env("CartPole-v1")
print(returns[-1], action, mean, report.passed)

with_actors = jppo.train("CartPole-v1", backend="ray", ray=jppo.RayConfig(num_actors=0), total_steps=1_000)
sweep: jppo.SweepResult = jppo.sweep("CartPole-v1", seeds=2, learning_rate=[1e-4, 1e-3], total_steps=1_000)
score: float = sweep.best().score
step = jppo.jit(jppo.make_anakin("CartPole-v1", config, total_steps=1_000).step)
jppo.export_policy(policy, "policy.npz")
loaded = jppo.numpy_policy.load("policy.npz")
print(with_actors.summary["return_mean"], score, step, loaded)
