"""Checks of the installation for `jppo doctor`."""

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

import jppo
from jppo.config.ray import num_cores
from jppo.devices.memory import host_bytes_free, show_bytes

EXTRAS = {  # the packages of each extra of pyproject.toml that jppo itself does not need
    "wandb": ("wandb",),
    "mujoco": ("mujoco",),
    "atari": ("ale-py", "opencv-python-headless"),
    "box2d": ("box2d",),
    "minigrid": ("minigrid",),
    "pettingzoo": ("pettingzoo", "mpe2", "pymunk"),
    "jaxmarl": ("jaxmarl",),
    "envpool": ("envpool",),
    **{name: (name,) for name in ("brax", "craftax", "jumanji", "navix", "playground", "xminigrid")},
    "train": ("pandas", "pyarrow"),
    "tune": ("pandas", "pyarrow", "optuna"),
}
_OWN_CHECK = ("jax", "ray")  # packages with their own line
_LOW_BYTES = 2**30  # of free memory, disk or shared memory
_OLD_SESSIONS_BYTES = 2 * 2**30
_COMMAND_SECONDS = 20


class Finding(NamedTuple):
    """The result of one check. A finding with a problem has the command that fixes it."""

    name: str
    text: str
    problem: str = ""
    fix: str = ""


def diagnose() -> Iterator[Finding]:
    """Yields the findings of all checks."""
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("jppo", f"{jppo.__version__}, {Path(jppo.__file__).parent}")
    yield from check_packages()
    found = list(check_jax())
    yield from found
    if not any(one.problem for one in found if one.name in ("jax", "devices")):
        yield from check_gymnax()
    yield check_ray()
    yield check_sessions(Path(tempfile.gettempdir()) / "ray")
    largest = "ps -eo pid,rss,args --sort=-rss | head  # shows the largest processes"
    yield check_space("memory", host_bytes_free(), fix=largest)
    for folder in dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir()))):
        largest = f"du -xh -d 2 {folder} | sort -h | tail  # shows the largest folders"
        yield check_space("disk", shutil.disk_usage(folder).free, f" in {folder}", fix=largest)
    for extra, packages in EXTRAS.items():
        yield check_extra(extra, packages)


def check_packages() -> Iterator[Finding]:
    """Yields the versions of the packages that jppo needs, and the ones that do not work."""
    try:
        lines = importlib.metadata.requires("jppo") or []
    except importlib.metadata.PackageNotFoundError:
        folder = shlex.quote(str(Path(jppo.__file__).parents[1]))
        problem = "jppo is not installed, so the versions of its packages cannot be checked"
        yield Finding("packages", "unknown", problem=problem, fix=f"pip install -e {folder}")
        return
    needed = {one.name: one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate()}
    versions = {name: find_version(name) for name in (*needed, "numpy")}  # numpy is a dependency of JAX
    shown = sorted(f"{name} {number}" for name, number in versions.items() if name not in _OWN_CHECK)
    yield Finding("packages", ", ".join(shown))
    for name, requirement in needed.items():
        if versions[name] == "missing":
            problem = f"{name} is not installed; jppo needs it"
        elif not requirement.specifier.contains(versions[name], prereleases=True):
            problem = f"jppo needs {requirement}; version {versions[name]} is installed"
        else:
            continue
        yield Finding("package", f"{name} {versions[name]}", problem=problem, fix=f"pip install '{requirement}'")


def check_gymnax() -> Iterator[Finding]:
    """Yields a finding if gymnax cannot be imported, or if an older package has overwritten its files."""
    from jppo.envs.gymnax import OVERWRITTEN, REINSTALL, REPAIR, import_gymnax

    version = find_version("gymnax")
    if version == "missing":  # see check_packages
        return
    try:
        import_gymnax()
    except Exception as error:  # a damaged installation raises any type
        if str(error).startswith(OVERWRITTEN):
            yield Finding("gymnax", version, problem=OVERWRITTEN, fix=REPAIR)
        else:
            yield Finding("gymnax", version, problem=f"gymnax cannot be imported: {error}", fix=REINSTALL)


def check_jax() -> Iterator[Finding]:
    """Yields the findings on JAX, its devices and its cache of compiled programs."""
    versions = f"{find_version('jax')}, jaxlib {find_version('jaxlib')}"
    try:
        import jax
    except Exception as error:  # a damaged installation raises any type
        problem = f"JAX cannot be imported: {error}"
        yield Finding("jax", versions, problem=problem, fix="pip install --force-reinstall jax jaxlib")
        return
    yield Finding("jax", versions)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        unknown = f"JAX_PLATFORMS={platforms} names a platform that JAX does not have here"
        problem = unknown if platforms else f"JAX has no device: {error}"
        yield Finding("devices", "none", problem, "unset JAX_PLATFORMS" if platforms else "export JAX_PLATFORMS=cpu")
        return
    kinds = {device.device_kind: sum(d.device_kind == device.device_kind for d in devices) for device in devices}
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if devices[0].platform == "cpu" and not platforms and (gpus := count_gpus()):
        problem = f"this machine has {gpus} NVIDIA GPU{'s' * (gpus > 1)}, but jaxlib has no support for GPUs"
        yield Finding("devices", text, problem=problem, fix="pip install -U 'jax[cuda13]'")
    else:
        yield Finding("devices", text + (f" (JAX_PLATFORMS={platforms})" if platforms else ""))
    yield check_cache()


def check_cache() -> Finding:
    """Returns the location and the size of the compilation cache, or why it is not used."""
    from jppo.devices.jit import CACHE, cache_path

    path = cache_path()
    if path is None:
        return Finding("cache", f"off ({CACHE}={os.environ.get(CACHE, '')})")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        problem = f"the cache of compiled programs cannot be written: {existing}"
        return Finding("cache", str(path), problem=problem, fix=f"export {CACHE}=/another/folder")
    return Finding("cache", f"{path}, {show_bytes(measure(path))}, writable")


def check_ray() -> Finding:
    """Returns the version of Ray and its resources on this machine or at RAY_ADDRESS."""
    installed, address, shared = find_version("ray"), os.environ.get("RAY_ADDRESS", ""), Path("/dev/shm")
    try:
        from jppo.actors.ray_cluster import check_reachable
    except Exception as error:  # a damaged installation raises any type
        problem = f"Ray cannot be imported: {error}"
        return Finding("Ray", installed, problem=problem, fix="pip install --force-reinstall ray")
    try:
        check_reachable(address)
    except OSError as error:
        problem = f"no Ray cluster answers at RAY_ADDRESS={address} ({error})"
        return Finding("Ray", installed, problem=problem, fix="unset RAY_ADDRESS")
    if shared.exists() and (free := shutil.disk_usage(shared).free) < _LOW_BYTES:
        problem = f"/dev/shm has {show_bytes(free)} free; Ray stores large objects in it"
        fix = "mount -o remount,size=4G /dev/shm  # in Docker: --shm-size=4g"
        return Finding("Ray", installed, problem=problem, fix=fix)
    where = f"cluster at {address}" if address else f"{num_cores()} CPUs on this machine"
    return Finding("Ray", f"{installed}, {where}")


def check_sessions(folder: Path) -> Finding:
    """Returns the sessions of Ray that run on this machine, and the size of the files of old ones."""
    running = find_sessions()
    old = [path for path in folder.glob("session_*") if path.is_dir() and path.name not in (*running, "session_latest")]
    size = sum(map(measure, old))
    count = f"{len(running)} running" + (f" ({', '.join(running)}; `ray stop` ends them)" if running else "")
    text = f"{count}, files of {len(old)} old ones in {folder}: {show_bytes(size)}"
    if size < _OLD_SESSIONS_BYTES:
        return Finding("Ray sessions", text)
    problem = f"old sessions of Ray use {show_bytes(size)} in {folder}"
    fix = f"find {folder} -maxdepth 1 -name 'session_2*' -mtime +1 -exec rm -r {{}} +"
    return Finding("Ray sessions", text, problem=problem, fix=fix)


def find_sessions(processes: Path = Path("/proc")) -> list[str]:
    """Returns the names of Ray's sessions with a raylet on this machine."""
    found = []
    for path in processes.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        name = re.search(r"session_[\d_-]+\d", " ".join(words))
        if Path(words[0]).name == "raylet" and name is not None:
            found.append(name[0])
    return sorted(set(found))


def check_space(name: str, free: float, where: str = "", *, fix: str) -> Finding:
    """Returns the free space in memory or on a disk, in bytes, and the command for too little of it."""
    text = f"{show_bytes(free)} free{where}"
    return Finding(name, text, problem=f"{name}: only {text}", fix=fix) if free < _LOW_BYTES else Finding(name, text)


def check_extra(extra: str, packages: tuple[str, ...]) -> Finding:
    """Returns the versions of the packages of an extra, or the command that installs it. Extras are optional."""
    versions = {name: find_version(name) for name in packages}
    if "missing" in versions.values():
        return Finding("extra", f"{extra:<11}missing: pip install 'jppo[{extra}]'")
    installed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return Finding("extra", f"{extra:<11}installed: {installed}")


def find_version(package: str) -> str:
    """Returns the version of an installed package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def count_gpus() -> int:
    """Returns the number of GPUs that nvidia-smi lists; 0 if it does not exist or fails."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def measure(folder: Path, limit: float = 2.0) -> int:
    """Returns the size of the files below a folder in bytes; of those that were found within `limit` seconds."""
    total, end = 0, time.monotonic() + limit
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            total += file.lstat().st_size if file.exists() else 0
        if time.monotonic() > end:
            break
    return total
