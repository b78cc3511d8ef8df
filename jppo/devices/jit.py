"""Compiler options, the cache of compiled programs, and transfers to the device."""

import functools
import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

CACHE = "JPPO_COMPILATION_CACHE"  # environment variable: a directory, or one of _OFF
_OFF = ("off", "0", "false", "no", "none")
_CPU_OPTIONS = {
    "xla_cpu_prefer_vector_width": 512,  # bits; no effect on processors with narrower vectors
    "xla_backend_optimization_level": 2,  # LLVM's; compiles 14 % faster than level 3, programs are equally fast
    "xla_cpu_copy_insertion_use_region_analysis": True,  # a fifth fewer copies in loops; updates 3 % faster (mean)
}
_CACHE_BYTES = 2**30
_SMALL_BYTES = 2**20
_LARGE_CONSTANTS = 10 * 2**20  # bytes
_CACHED_SECONDS = 0.2  # programs that compile faster are not cached


def jit(fun: Callable, **kwargs: Any) -> Any:
    """Compiles a function like `jax.jit`, with jppo's compiler options.

    Use it only for a function that no other jitted function calls. On CPUs, the options let XLA use the full width of
    AVX-512 (docs/performance.md). An option in the environment variable `XLA_FLAGS` takes precedence, but not one in a
    file that it names. Later processes load the compiled program from a cache in the user's home. Set the environment
    variable `JPPO_COMPILATION_CACHE` to another directory, or to "off". If JAX already has a compilation cache, jppo
    uses that one.
    """
    _enable_cache()
    return jax.jit(fun, compiler_options=_compiler_options(), **kwargs)


def lower(program: Any, *args: Any) -> Any:
    """Lowers a function of `jit`. Warns of large arrays that the environment or network closes over."""
    traced, constants = program.trace(*args), dict[int, int]()
    _find_constants(traced.jaxpr, constants)
    if (size := sum(constants.values())) > _LARGE_CONSTANTS:
        warnings.warn(
            f"arrays of {size / 2**20:,.0f} MiB that the environment or network closes over become constants of each "
            "program, which costs time and memory; set JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1 before Python starts",
            stacklevel=2,
        )
    return traced.lower()


def _find_constants(jaxpr: Any, sizes: dict[int, int]) -> None:
    """Adds the bytes of the constants of a program, also in nested functions, by the identity of the array."""
    sizes.update((id(x), getattr(x, "nbytes", 0)) for x in getattr(jaxpr, "consts", ()))
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                _find_constants(inner, sizes)


def _compiler_options() -> dict[str, Any] | None:
    if jax.default_backend() != "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in _CPU_OPTIONS.items() if f"--{name}=" not in flags}


def materialize_on_cpu(x: Any) -> Any:
    """Returns the pytree unchanged. On a CPU, XLA must write its arrays to memory, such as the result of a transpose.

    Without this, XLA may replace the transpose by slow strided reads on one thread (docs/performance.md).
    """
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def make_device_put(sharding: Any = None) -> Callable[[Any], Any]:
    """Returns a function that copies a pytree of NumPy arrays to the device.

    Small pytrees take one compiled call, which needs a third of `jax.device_put`'s time but makes one more copy
    (docs/performance.md). With `jax_debug_nans`, JAX also checks this call for NaN.
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
def _enable_cache() -> None:
    """Enables JAX's compilation cache, once per process. Does nothing if the directory cannot be used."""
    path = cache_path()
    if path is None or jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK) or path.stat().st_uid != os.geteuid():  # JAX executes its content
            return
    except OSError:
        return
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)  # also makes JAX lock it
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _CACHED_SECONDS)
    jax.config.update("jax_compilation_cache_dir", str(path))


def cache_path() -> Path | None:
    """Returns the directory of the compiled programs: JAX's own cache if there is one, otherwise jppo's. None if the
    cache is off, or if the user has no home."""
    if (own := jax.config.jax_compilation_cache_dir) is not None:  # type: ignore[attr-defined]
        return Path(own)
    general = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = os.environ.get(CACHE) or (general if general.is_absolute() else Path("~/.cache")) / "jppo"
    if str(folder).lower() in _OFF:
        return None
    try:
        return Path(folder).expanduser() / f"jax-{jax.__version__}-{_processor()}"
    except RuntimeError:  # the user has no home
        return None


def _processor() -> str:
    """Returns a hash of the processor's instruction sets, because machines that share a home may differ in them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
