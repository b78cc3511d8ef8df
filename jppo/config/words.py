"""Words of Stable-Baselines3, RLlib, CleanRL and other libraries, and what jppo has instead."""

from collections.abc import Collection
from typing import Any

_GPU = "JAX uses a GPU if its GPU build is installed; JAX_PLATFORMS=cpu selects the CPU"
_TRAIN = "jppo.train(env, total_steps=...) trains and returns a result with the policy"
_ACT = "policy.act(obs) returns actions, with result.policy or jppo.load_policy(run_dir) as policy"
_SAVE = "jppo.train(env, run_dir=...) saves the run, and jppo.load_policy(run_dir) loads its policy"
_VECTOR = "jppo.train(env, num_envs=...) makes the environments"
_PROGRESS = 'progress="auto" shows the progress; the command line does so unless --quiet is set'
_NETWORK = "hidden_sizes, activation and network describe the network"

# A word's value is a name of jppo (or several, of different functions, separated by |), or a sentence.
WORDS: dict[str, str] = {
    **dict.fromkeys(("lr", "lr_schedule"), "learning_rate"),
    **dict.fromkeys(("steps", "timesteps", "total_timesteps", "num_timesteps"), "total_steps"),
    **dict.fromkeys(("n_envs", "num_envs_per_learner"), "num_envs"),
    **dict.fromkeys(("n_steps", "rollout_length", "rollout_fragment_length"), "num_steps"),
    **dict.fromkeys(("n_epochs", "update_epochs", "num_sgd_iter"), "num_epochs"),
    "n_minibatches": "num_minibatches",
    **{name: f"num_minibatches = num_envs*num_steps/{name}" for name in ("batch_size", "minibatch_size")},
    "sgd_minibatch_size": "num_minibatches = num_envs*num_steps/sgd_minibatch_size",
    "train_batch_size": "an update takes num_envs*num_steps samples: set one of these",
    **dict.fromkeys(("clip_range", "clip_coef", "clip_param"), "clip_eps"),
    **dict.fromkeys(("clip_range_vf", "vf_clip_param"), "vf_clip_eps"),
    "clip_vloss": "clip_value",
    **dict.fromkeys(("entropy_coef", "entropy_coeff"), "ent_coef"),
    **dict.fromkeys(("value_coef", "vf_loss_coeff"), "vf_coef"),
    **dict.fromkeys(("lam", "lambda", "lambda_"), "gae_lambda"),
    "grad_clip": "max_grad_norm",
    "kl_target": "target_kl",
    "anneal_lr": "a learning_rate of jppo.schedules.linear(2.5e-4, 0), or 2.5e-4:0 in a shell, decreases to 0",
    "norm_adv": "normalize_advantage",
    "norm_obs": "normalize_obs",
    "norm_reward": "normalize_reward",
    "VecNormalize": "normalize_obs and normalize_reward normalize observations and rewards",
    **dict.fromkeys(("net_arch", "fcnet_hiddens"), "hidden_sizes"),
    **dict.fromkeys(("activation_fn", "fcnet_activation"), "activation"),
    **dict.fromkeys(("policy", "policy_kwargs", "model"), _NETWORK),
    "use_sde": "jppo has no state-dependent exploration",
    **dict.fromkeys(("workers", "num_workers", "num_env_runners"), "num_actors"),
    **dict.fromkeys(("num_envs_per_worker", "num_envs_per_env_runner"), "envs_per_actor"),
    **dict.fromkeys(("device", "cuda", "gpu", "gpus", "num_gpus", "platform"), _GPU),
    **dict.fromkeys(("verbose", "progress_bar"), _PROGRESS),
    **dict.fromkeys(("tensorboard_log", "tb_log_name"), "a run with run_dir writes TensorBoard events there"),
    "log_interval": "log_every",
    "callbacks": "callback",
    **dict.fromkeys(("track", "wandb_project_name"), "wandb"),
    "capture_video": "video",
    "eval_freq": "eval_every counts updates, of num_envs*num_steps steps each",
    "n_eval_episodes": "eval_episodes|num_episodes",
    "deterministic": "actions are the most likely ones unless sampled is set; in jppo.train, it repeats a run",
    "env_config": "pass a function that makes the environment, such as lambda: gymnasium.make(...)",
    "max_episode_steps": "max_steps_in_episode",
    **dict.fromkeys(("halving", "successive_halving", "pbt"), "selection"),
    **dict.fromkeys(("PPO", "learn", "fit"), _TRAIN),
    **dict.fromkeys(("predict", "compute_single_action"), _ACT),
    **dict.fromkeys(("save", "load", "restore", "from_checkpoint"), _SAVE),
    **dict.fromkeys(("make_vec_env", "DummyVecEnv", "SubprocVecEnv"), _VECTOR),
    "evaluate_policy": "jppo.evaluate(result) evaluates a policy",
}


def translate(word: str, names: Collection[str]) -> str | None:
    """Returns which of these names of jppo another library's word has, or None."""
    return next((name for name in WORDS.get(word, "").split("|") if name in names), None)


def explain(word: str, names: Collection[str] = ()) -> str:
    """Returns what jppo has instead of another library's word, for an error message; "" for other words.

    Args:
      names: the names that would be right in the word's place.
    """
    if name := translate(word, names):
        return f"did you mean {name}?"
    answer = WORDS.get(word, "")
    return f"jppo.train calls it {answer.partition('|')[0]}" if answer and " " not in answer else answer


def refuse_attribute(owner: Any, name: str) -> Any:
    """Raises AttributeError, with a hint for the words of other libraries. It is `__getattr__` of public classes."""
    hint = explain(name)
    raise AttributeError(f"{type(owner).__name__} has no attribute {name!r}{hint and '; '}{hint}", name=name, obj=owner)
