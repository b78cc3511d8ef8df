"""Tests the import order of the packages and which packages may import each outside library."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jppo

ROOT = Path(jppo.__file__).parent

# Each package may import itself and the packages to the left of it.
ORDER = (
    "errors",
    "config",
    "devices",
    "envs",
    "kernels",
    "networks",
    "ppo",
    "actors",
    "runs",
    "training",
    "sweeps",
    "benchmark",
    "cli",
)

ALL = set(ORDER) - {"config", "errors"}
ALLOWED = {
    "jax": ALL,
    "numpy": ALL,
    "chex": ALL,
    "flax.struct": ALL,
    "flax": {"networks"},
    "optax": {"kernels", "ppo"},
    "gymnax": {"envs", "runs"},  # runs: gymnax draws its own environments
    "gymnasium": {"envs", "runs"},
    "ale_py": {"envs"},
    **{name: {"envs"} for name in ("brax", "craftax", "jumanji", "mujoco", "mujoco_playground", "navix", "xminigrid")},
    "envpool": {"envs"},
    "minigrid": {"envs"},
    "pettingzoo": {"envs"},
    "jaxmarl": {"envs"},
    "ray": {"actors", "training", "sweeps"},
    "filelock": {"runs"},
    "orbax": {"runs"},
    "tensorstore": {"runs"},
    "tensorboardX": {"runs"},
    "wandb": {"runs"},
    "matplotlib": {"runs"},
    "PIL": {"runs"},
    "rich": {"envs", "training", "sweeps", "benchmark", "cli"},  # envs: the report of check_env
    "threadpoolctl": {"actors"},
    "tyro": {"cli"},
    "packaging": {"cli"},
}


def read_sources():
    """Returns {module name without `jppo.`: source}."""
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        sources[name] = path.read_text()
    return sources


def find_imports(source):
    """Returns the dotted names of all imports, also those inside functions; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # allowed in one package, see test_exported_policy_needs_only_numpy
                continue
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def find_internal_imports(source):
    """Returns the imported modules of jppo, without the prefix."""
    names = {name.removeprefix("jppo.") for name in find_imports(source) if name.startswith("jppo.")}
    return {name if name in SOURCES else name.rpartition(".")[0] or "__init__" for name in names}


def find_external_imports(source):
    """Returns the imports from outside jppo and the standard library."""
    roots = {*sys.stdlib_module_names, "jppo"}
    return {name for name in find_imports(source) if name.partition(".")[0] not in roots}


def package_of(module):
    return {"__init__": "config", "__main__": "cli"}.get(module) or module.partition(".")[0]


SOURCES = read_sources()


def test_parser_finds_every_kind_of_import():
    source = "\n".join(
        (
            "import os",
            "import optax",
            "def f():",
            "    from jppo.runs import load",
            "    from jppo.ppo.types import Metrics",
            "    import ray",
        )
    )
    assert find_internal_imports(source) == {"runs.load", "ppo.types"}
    assert find_external_imports(source) == {"optax", "ray"}
    assert {"config.ppo", "ppo.learner", "envs", "envs.gymnax", "__init__"} <= set(SOURCES)


def test_every_module_is_in_a_known_package():
    assert {package_of(module) for module in SOURCES} == set(ORDER)


@pytest.mark.parametrize("module", sorted(set(SOURCES) - {"__init__"}))  # __init__ imports lazily
def test_imports_follow_the_package_order(module):
    rank = ORDER.index(package_of(module))
    imported = find_internal_imports(SOURCES[module]) - {"__init__"}
    assert not {name for name in imported if ORDER.index(package_of(name)) > rank}


def test_modules_have_no_circular_imports():
    graph = {module: find_internal_imports(source) for module, source in SOURCES.items() if module != "__init__"}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_outside_libraries_are_imported_by_their_packages_only(module):
    for name in find_external_imports(SOURCES[module]):
        libraries = [library for library in ALLOWED if name == library or name.startswith(f"{library}.")]
        assert libraries, f"jppo.{module} imports {name}, which is not in ALLOWED"
        assert package_of(module) in ALLOWED[max(libraries, key=len)], f"jppo.{module} imports {name}"


def test_refusals_have_their_own_exception():
    """The command line prints one line for Refused only; a ValueError shows its traceback."""
    sources = {name: source for name, source in SOURCES.items() if not name.startswith("actors.numpy_policy")}
    assert [name for name, source in sources.items() if re.search(r"\b(raise|return) ValueError\(", source)] == []


def test_exported_policy_needs_only_numpy():
    """Its modules import each other relatively, so that the folder can be copied. All other imports are absolute."""
    relative = {
        module
        for module, source in SOURCES.items()
        if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(source)))
    }
    assert relative == {"actors.numpy_policy", "actors.numpy_policy.layers"}
    for module in (*relative, "actors.numpy_policy.spaces"):
        assert find_external_imports(SOURCES[module]) == {"numpy"}
        assert find_internal_imports(SOURCES[module]) == set()


def test_no_module_imports_rllib():
    assert not any("rllib" in name for source in SOURCES.values() for name in find_imports(source))


def test_import_jppo_loads_no_library():
    program = """if True:
        import os, sys
        before = dict(os.environ)
        import jppo
        heavy = {"jax", "numpy", "flax", "optax", "gymnax", "gymnasium", "ray", "matplotlib"} & set(sys.modules)
        assert not heavy, heavy
        assert dict(os.environ) == before
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_importing_modules_starts_no_jax_backend():
    """Backend options, which actors set, have no effect after the backend has started."""
    names = (name for name in sorted(SOURCES) if not name.startswith("envs.families."))  # families create arrays
    modules = ", ".join(f"jppo.{name}" for name in names if name not in ("__init__", "__main__"))
    program = f"import {modules}; from jax._src import xla_bridge; assert not xla_bridge._backends"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr


def test_public_names_agree_with_the_names_for_type_checkers():
    for node in ast.parse(SOURCES["__init__"]).body:
        if isinstance(node, ast.If):
            imports = [item for item in node.body if isinstance(item, ast.ImportFrom)]
    typed = {alias.name: item.module for item in imports for alias in item.names}
    modules = {"jppo.sweeps.tune", "jppo.actors.numpy_policy", "jppo.config.schedules"}
    typed |= {name.rpartition(".")[2]: name for name in modules}
    assert typed == jppo._HOMES
    for name in jppo.__all__:
        assert getattr(jppo, name) is not None
    assert set(dir(jppo)) == {*jppo.__all__, "__version__"}


def test_unknown_public_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'jppo' has no attribute 'ppo2'"):
        jppo.ppo2  # noqa: B018


@pytest.mark.parametrize("path", sorted((ROOT.parent / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_use_public_names_only(path):
    tree = ast.parse(path.read_text())
    assert not [name for name in find_imports(path.read_text()) if name.startswith("jppo.")]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jppo"
    }
    assert used <= set(jppo.__all__)


@pytest.mark.slow
def test_on_device_run_imports_no_host_modules():
    """Actors, Ray and Gymnasium are of no use to a run on the device."""
    program = """if True:
        import sys
        import jppo
        jppo.train("CartPole-v1", config=jppo.PPOConfig(num_envs=2, num_steps=2, num_minibatches=1), total_steps=4)
        print(*(name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("jppo.actors.")))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=180)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
