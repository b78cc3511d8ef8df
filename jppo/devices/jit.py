"""How programs are compiled, and where they are kept."""

import functools
import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

CACHE = "JPPO_COMPILATION_CACHE"  # the environment variable: a folder, or one of these
_OFF = ("off", "0", "false", "no", "none")
_CPU_OPTIONS = {
    "xla_cpu_prefer_vector_width": 512,  # bits; on processors with fewer it changes nothing
    "xla_backend_optimization_level": 2,  # of LLVM: compiles a seventh faster than 3, to as fast a program
}
_CACHE_BYTES = 2**30
_SMALL_BYTES = 2**20
_CACHED_SECONDS = 0.2  # what compiles faster is not kept


def jit(fun: Callable, **kwargs: Any) -> Any:
    """`jax.jit` with the options that this library's programs want; for outermost functions.

    Compiled programs are kept from one process to the next, in a folder of the user's (`JPPO_COMPILATION_CACHE` names
    another, or "off"), unless JAX has been given a compilation cache already.

    By itself XLA does not use the whole width of a CPU's AVX-512, where there is one (docs/performance.md).
    """
    _keep_programs()
    options = _CPU_OPTIONS if jax.default_backend() == "cpu" else None
    return jax.jit(fun, compiler_options=options, **kwargs)


def materialize_on_cpu(x: Any) -> Any:
    """The same pytree; on CPU XLA is made to write it to memory as it is, transposed for instance, where it would
    otherwise read another one at strides, and on one thread (docs/performance.md). Elsewhere a copy would only cost."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def make_device_put(sharding: Any = None) -> Callable[[Any], Any]:
    """What puts a pytree of NumPy arrays on the device.

    Small ones in one call, which takes a third of `jax.device_put`'s time but makes a copy more (docs/performance.md),
    and which `jax_debug_nans` checks.
    """

    @functools.partial(jax.jit, out_shardings=sharding)
    def put_small(tree: Any) -> Any:
        return tree

    def put(tree: Any) -> Any:
        if sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) <= _SMALL_BYTES:
            return put_small(tree)
        return jax.device_put(tree, sharding)

    return put


@functools.cache
def _keep_programs() -> None:
    """Gives JAX a compilation cache, once per process; does nothing where there is no place for one."""
    general = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = os.environ.get(CACHE) or (general if general.is_absolute() else Path("~/.cache")) / "jppo"
    own: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if own is not None or str(folder).lower() in _OFF:
        return
    try:
        path = Path(folder).expanduser() / f"jax-{jax.__version__}-{_processor()}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK) or path.stat().st_uid != os.geteuid():  # what is in it gets run
            return
    except (OSError, RuntimeError):  # the latter: no home
        return
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)  # also makes JAX lock it
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _CACHED_SECONDS)
    jax.config.update("jax_compilation_cache_dir", str(path))


def _processor() -> str:
    """Tells processors with other instructions apart: programs for one can crash another, and homes are shared."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
