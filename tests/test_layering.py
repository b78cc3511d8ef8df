"""Imports go down the layers, each outside system has one door, and `import jppo` does nothing."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import jppo

ROOT = Path(jppo.__file__).parent

COMMANDS = [f"commands.{name}" for name in ("bench", "check", "export", "plan", "runs", "sweep")]

# Top to bottom as a reader meets them; a module not listed here fails, so that whoever adds one places it.
LAYERS = [
    {"config", "types", "spaces", "presets", "compiling", "determinism", "devices", "errors"},
    {"advantages", "losses", "distributions", "statistics", "shuffle"},
    {"initial", "networks", "learner", "numpy_form", "numpy_policy", "optimizers", "pieces"},
    {
        "acting",
        "envs",
        "envs.base",
        "envs.gymnasium",
        "envs.gymnax",
        "envs.host_spaces",
        "collect",
        "env_runner",
        "evaluation",
    },
    {"anakin", "actor_process", "actors", "connection", "in_process", "sebulba", "turns"},
    {
        *(
            "actor_loop",
            "benched",
            "benching",
            "checking",
            "checking.device",
            "checking.host",
            "checking.judges",
            "checking.report",
            "checking.trace",
            "checking.vector",
            "checkpoints",
            "cli",
            "driver",
            "commands",
            *COMMANDS,
            "exporting",
            "given",
            "groups",
            "history",
            "hosts",
            "interrupts",
            "lanes",
            "load",
            "logbook",
            "loops",
            "parts",
            "planning",
            "plots",
            "policy",
        ),
        *(
            "population",
            "progress",
            "render",
            "results",
            "run_writer",
            "running",
            "runs",
            "sweeps",
            "tasks",
            "trials",
            "tune",
        ),
        *("__init__", "__main__"),
    },
]
LAYER = {module: number for number, layer in enumerate(LAYERS) for module in layer}

EVERYWHERE = {"jax", "numpy", "flax.struct"}
DOORS = {
    "optax": {"optimizers"},
    "flax.linen": {"networks"},
    "gymnax": {"envs.gymnax", "render"},  # render: gymnax draws its own environments
    "gymnasium": {"envs.gymnasium", "envs.host_spaces", "render"},
    "ale_py": {"envs.gymnasium"},
    "envpool": {"envs.gymnasium"},
    "ray": {"actor_process", "actors", "connection", "hosts", "tasks", "trials", "tune"},  # trials, tune: Tune
    "matplotlib": {"plots", "render"},
    "PIL": {"render"},
    "orbax": {"checkpoints", "runs"},
    "tensorboardX": {"run_writer"},
    "wandb": {"run_writer"},
    "rich": {"benched", "checking.report", "commands.runs", "planning", "progress", "results"},
    "tyro": {"cli", "commands", *COMMANDS},
}


def sources():
    """Module name (without `jppo.`) -> its source."""
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in ROOT.rglob("*.py")}
    names = {".".join(p.parts[:-1] if p.name == "__init__" and p.parent.parts else p.parts): p for p in paths}
    return {name: paths[path].read_text() for name, path in names.items()}


def imports(source):
    """Dotted names of everything imported, at the top or inside a function; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(source):
    """Modules of jppo that it imports, without the prefix."""
    own = {name.removeprefix("jppo.") for name in imports(source) if name.startswith("jppo.")}
    return {name if name in LAYER else name.rpartition(".")[0] or "__init__" for name in own}


def outside(source):
    """Imports from neither jppo nor the standard library."""
    roots = {*sys.stdlib_module_names, "jppo"}
    return {name for name in imports(source) if name.partition(".")[0] not in roots}


def belongs(name, package):
    return name == package or name.startswith(f"{package}.")


SOURCES = sources()


def test_the_parser_sees_every_kind_of_import():
    source = "import os\nimport optax\ndef f():\n    from jppo import runs\n    from jppo.ppo.types import Array\n    import ray"
    assert inside(source) == {"runs", "types"}
    assert outside(source) == {"optax", "ray"}
    assert {"config", "learner", "envs", "envs.gymnax", "__init__"} <= set(SOURCES)


def test_every_module_has_a_layer():
    assert set(SOURCES) <= set(LAYER), "place new modules in LAYERS"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_go_down(module):
    wrong = {name for name in inside(SOURCES[module]) if LAYER[name] > LAYER[module]}
    assert not wrong


def test_no_module_imports_itself_in_a_circle():
    graph = {module: inside(source) for module, source in SOURCES.items() if module != "__init__"}  # that one is lazy
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_outside_systems_are_entered_by_their_doors(module):
    for name in outside(SOURCES[module]):
        doors = [modules for package, modules in DOORS.items() if belongs(name, package)]
        allowed = any(belongs(name, package) for package in EVERYWHERE) or any(module in modules for modules in doors)
        assert allowed, f"{name} in jppo.{module}"


@pytest.mark.parametrize("module", sorted(LAYERS[1]))
def test_the_maths_needs_only_jax_and_the_vocabulary(module):
    assert inside(SOURCES[module]) <= LAYERS[0]
    assert all(any(belongs(name, package) for package in EVERYWHERE) for name in outside(SOURCES[module]))


def test_the_configuration_needs_only_the_standard_library():
    assert outside(SOURCES["config"]) | outside(SOURCES["presets"]) == set()
    assert inside(SOURCES["config"]) == set()
    assert inside(SOURCES["presets"]) == {"config"}


def test_the_exported_policy_needs_numpy_alone():
    assert outside(SOURCES["numpy_policy"]) == {"numpy"}
    assert inside(SOURCES["numpy_policy"]) == set()


def test_nothing_imports_rllib():
    assert not any("rllib" in name for source in SOURCES.values() for name in imports(source))


def test_importing_jppo_does_nothing():
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


def test_importing_modules_starts_no_backend_of_jax():
    """After which a program could set no option of the backend's any more, nor could an actor."""
    modules = ", ".join(f"jppo.{module}" for module in sorted(SOURCES) if module not in ("__init__", "__main__"))
    program = f"import {modules}; from jax._src import xla_bridge; assert not xla_bridge._backends"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
