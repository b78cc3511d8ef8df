"""Trains once with RLlib's PPO for versus_rllib.py. Takes the settings as JSON and prints the result as JSON.

It runs in RLlib's Python environment, so it imports neither jppo nor jax.
"""

import json
import math
import platform
import sys
import time
from importlib.metadata import version
from typing import Any

import host_envs
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

PACKAGES = ("ray", "torch", "gymnasium", "numpy")


def log_return(*, episode: Any, prev_episode_chunks: Any, metrics_logger: Any, **_: Any) -> None:
    """Logs the sum of the returns of one update's episodes. RLlib's own mean includes the last hundred episodes.

    Args:
      prev_episode_chunks: parts of the episode in earlier rollouts.
    """
    parts = [*(prev_episode_chunks or ()), episode]
    metrics_logger.log_value("update_returns", sum(part.get_return() for part in parts), reduce="sum")


def make_config(setting: dict[str, Any]) -> PPOConfig:
    """Returns the config for the new API stack with the learner in this process."""
    register_env(setting["env"], lambda _: getattr(host_envs, setting["env"])())
    network = DefaultModelConfig(
        fcnet_hiddens=list(setting["hidden_sizes"]),
        fcnet_activation="tanh",
        fcnet_kernel_initializer="orthogonal_",
        fcnet_kernel_initializer_kwargs={"gain": math.sqrt(2.0)},
        fcnet_bias_initializer="zeros_",
        vf_share_layers=False,
    )
    return (
        PPOConfig()
        .environment(setting["env"])
        .env_runners(
            num_env_runners=setting["num_actors"],
            num_envs_per_env_runner=setting["envs_per_actor"],
            rollout_fragment_length="auto",
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=setting["batch_size"],
            minibatch_size=setting["batch_size"] // setting["num_minibatches"],
            num_epochs=setting["num_epochs"],
            lr=setting["learning_rate"],
            gamma=setting["gamma"],
            lambda_=setting["gae_lambda"],
            clip_param=setting["clip_eps"],
            entropy_coeff=setting["ent_coef"],
            vf_loss_coeff=setting["vf_coef"] / 2,  # RLlib multiplies the squared error, jppo half of it
            vf_clip_param=math.inf,  # RLlib clips the squared error
            use_kl_loss=False,
            grad_clip=setting["max_grad_norm"],
        )
        .rl_module(model_config=network)
        .callbacks(on_episode_end=log_return)
        .debugging(seed=setting["seed"], log_level="ERROR")
    )


def main() -> None:
    setting = json.loads(sys.argv[1])
    if setting["torch_threads"]:
        torch.set_num_threads(setting["torch_threads"])
    ray.init(address="local", num_cpus=setting["num_actors"] + 1, include_dashboard=False, log_to_driver=False)
    algorithm = make_config(setting).build_algo()
    seconds, steps = [], []
    start = time.perf_counter()
    for _ in range(setting["num_updates"]):
        metrics = algorithm.train()["env_runners"]
        seconds.append(time.perf_counter() - start)
        steps.append(int(metrics["num_env_steps_sampled_lifetime"]))
    result = {
        "seconds": seconds,
        "steps": steps,
        "return_mean": metrics["update_returns"] / metrics["num_episodes"] if metrics.get("num_episodes") else None,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    algorithm.stop()
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
