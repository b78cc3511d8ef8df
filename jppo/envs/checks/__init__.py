"""Whether an environment is one that PPO can learn in, found by playing with it (docs/check_env.md)."""

from typing import Any

from jppo.config.checks import check_int, check_seed
from jppo.envs.backends import choose_backend
from jppo.envs.checks.report import MEANING, Check, Report, make_report, print_report

__all__ = ["MEANING", "Check", "Report", "check_env", "print_report"]

_MOST_STEPS = 1_000_000


def check_env(
    env: Any, *, params: Any = None, backend: str = "auto", steps: int = 1024, seed: int = 0, num_envs: int = 8
) -> Report:
    """Plays with random actions and says what it sees; docs/check_env.md lists the checks.

    Args:
      env: as for `jppo.train`; or one Gymnasium environment, which is then played alone (and closed).
      params: of an environment on the device; its default_params when None.
      backend: "device" (on the device), "ray" (Gymnasium's) or "auto".
      steps: of each environment.
      num_envs: environments, with the seeds seed, seed + 1, ...

    Raises:
      ValueError: a name that nobody knows, or a number that cannot be. What is wrong with the environment itself is
        reported.
    """
    check_int("steps", steps)
    check_int("num_envs", num_envs)
    if steps * num_envs > _MOST_STEPS:
        raise ValueError(f"steps*num_envs = {steps * num_envs:,} must be at most {_MOST_STEPS:,}: all are kept")
    seed = check_seed(seed)
    backend = choose_backend(env, backend)
    if backend == "device":
        from jppo.envs.checks import check_gymnax

        found, names = check_gymnax.check(env, params, steps, seed, num_envs), check_gymnax.NAMES
    else:
        from jppo.envs.checks import check_gymnasium

        if params is not None:
            raise ValueError("params are those of an environment on the device")
        num_envs = 1 if check_gymnasium.is_made(env) else num_envs
        found, names = check_gymnasium.check(env, steps, seed, num_envs), check_gymnasium.NAMES
    name = env if isinstance(env, str) else _name(env)
    return make_report(names, found, env=name, backend=backend, seed=seed, steps=steps, num_envs=num_envs)


def _name(env: Any) -> str:
    registered = getattr(getattr(env, "spec", None), "id", None)
    own = getattr(env, "__qualname__", None) or getattr(env, "name", type(env).__name__)
    return str(registered or own)
