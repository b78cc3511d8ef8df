"""Writes run directories without training."""

import jax
from lenient import lenient

import jppo
from jppo.runs.run_dir import run_config
from jppo.runs.writer import RunWriter

ROW = {
    "update": 1,
    "env_steps": 32,
    "time/elapsed": 0.5,
    "episode/count": 2.0,
    "episode/return_mean": 1.5,
    "episode/return_std": 0.5,
}


def save_run(path, env="CartPole-v1", config=jppo.PPOConfig(num_envs=4, num_steps=8, hidden_sizes=(8,)), **more):
    """Writes the run directory of an untrained policy. Returns the policy's state."""
    with lenient():
        agent = jppo.make_anakin(env, config)
        policy = jax.jit(agent.init)(jax.random.key(0)).train.policy_state
    settings = run_config(env, "device", 0, 1000, config, jppo.Hyperparams(), **more)
    writer = RunWriter(path, settings)
    writer.write_updates([ROW])
    writer.close(policy, {"status": "finished"})
    return policy
