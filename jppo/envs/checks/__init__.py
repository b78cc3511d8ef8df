"""Checks whether an environment is suitable for PPO, by stepping it with random actions (docs/check_env.md)."""

from typing import Any

from jppo.config.checks import check_int, check_seed
from jppo.envs.backends import choose_backend
from jppo.envs.checks.report import Check, CheckReport, collect_checks, make_report, print_report
from jppo.errors import Refused

__all__ = ["Check", "CheckReport", "check_env", "print_report"]

_MAX_STEPS = 1_000_000


def check_env(
    env: Any, *, params: Any = None, backend: str = "auto", steps: int = 1024, seed: int = 0, num_envs: int = 8
) -> CheckReport:
    """Steps an environment with random actions and reports its faults; docs/check_env.md lists the checks.

    Args:
      env: as for `jppo.train`, or one Gymnasium environment, which is then checked alone and not closed.
      params: parameters of an on-device environment; its default_params when None.
      backend: "device" (gymnax environments), "ray" (Gymnasium environments) or "auto".
      steps: number of steps of each environment.
      seed: seed of the first environment; the others have the next seeds.
      num_envs: number of environments.

    Raises:
      ValueError: the name is unknown, or an argument is invalid. Faults of the environment are reported instead.
    """
    check_int("steps", steps)
    check_int("num_envs", num_envs)
    if steps * num_envs > _MAX_STEPS:
        raise Refused(f"steps*num_envs = {steps * num_envs:,} must be at most {_MAX_STEPS:,}, which fit in memory")
    seed = check_seed(seed)
    backend = choose_backend(env, backend)
    if backend == "device":
        from jppo.envs.checks import check_gymnax

        names, checks = check_gymnax.NAMES, check_gymnax.check(env, params, steps, seed, num_envs)
    else:
        from jppo.envs.checks import check_gymnasium

        if params is not None:
            raise Refused("params apply to on-device environments only; use backend = 'device'")
        num_envs = 1 if check_gymnasium.is_instance(env) else num_envs
        names, checks = check_gymnasium.NAMES, check_gymnasium.check(env, steps, seed, num_envs)
    name = env if isinstance(env, str) else _name_of(env)
    return make_report(
        names, collect_checks(checks, names[0]), env=name, backend=backend, seed=seed, steps=steps, num_envs=num_envs
    )


def _name_of(env: Any) -> str:
    registered = getattr(getattr(env, "spec", None), "id", None)
    return str(registered or getattr(env, "__qualname__", None) or getattr(env, "name", type(env).__name__))
