"""Selects the backend of an environment."""

import inspect
from typing import Any

from jppo.config.checks import names_module
from jppo.config.families import family_of
from jppo.envs.episodes import is_device_env
from jppo.envs.families import check_family_name
from jppo.envs.gymnax import available
from jppo.envs.modules import import_module_of, unknown_environment
from jppo.errors import Refused

BACKENDS = ("auto", "device", "ray")


def choose_backend(env: Any, backend: str = "auto") -> str:
    """Returns "device" or "ray". "auto" imports the module of module:name.

    Raises:
      ValueError: the backend, the environment or its module is unknown.
    """
    if backend not in BACKENDS:
        raise Refused(f"backend = {backend!r} is not one of {', '.join(BACKENDS)}")
    if family_of(env) is not None:
        if backend == "ray":
            raise Refused(f"{env} runs on the device; use backend = 'device'")
        check_family_name(env)
        return "device"
    if backend != "auto":
        _check_backend(env, backend)
        return backend
    if isinstance(env, str) and ":" not in env and env in available():
        return "device"
    if names_module(env):
        module, name = import_module_of(env)
        found = getattr(module, name, None)  # None: the module may register a Gymnasium environment of this name
        return "device" if is_device_env(found) else "ray"
    from jppo.envs.gymnasium import is_host_env  # an on-device run does not need these modules
    from jppo.envs.host_families import host_env_names

    if not isinstance(env, str):
        return "device" if is_device_env(env) or not is_host_env(env) else "ray"
    if is_host_env(env):
        return "ray"
    raise unknown_environment(env, [*available(), *host_env_names()])


def _check_backend(env: Any, backend: str) -> None:
    """Raises ValueError if only the other backend has an environment of this name."""
    if not isinstance(env, str) or ":" in env:
        return
    from jppo.envs.gymnasium import is_host_env

    if backend == "device" and env not in available() and is_host_env(env):
        raise Refused(f"{env} is a Gymnasium environment; use backend = 'ray'")
    if backend == "ray" and not is_host_env(env) and env in available():
        raise Refused(f"{env} is a gymnax environment; use backend = 'device'")


def require_device(env: Any, function: str, remedy: str) -> None:
    """Raises ValueError for an environment that does not run on the device.

    Args:
      function: the name of the caller, which supports no other environments.
      remedy: the end of the message.
    """
    if choose_backend(env) == "device":
        return
    name = env if isinstance(env, str) else getattr(env, "__name__", getattr(env, "name", type(env).__name__))
    kind = "a function" if inspect.isfunction(env) else "a Gymnasium environment"
    if isinstance(env, str) and names_module(env):  # nobody has made the environment, it may be any object
        kind, remedy = "not the name of a JAX environment", f"in Python, {remedy}"
    raise Refused(f"{name} is {kind}; {function} supports JAX environments only: {remedy}")
