"""Tests that names, commands and links in the documentation exist."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys

import jax
import pytest
from lenient import lenient_env
from PIL import Image
from public_types import reachable_types
from snippets import PAGES, ROOT, blocks, commands

import jppo
from jppo.cli.main import COMMANDS, parse_command
from jppo.ppo import losses
from jppo.ppo.losses import ppo_loss


@pytest.mark.slow
def test_metrics_page_defines_exactly_the_logged_metrics():
    config = jppo.PPOConfig(num_envs=4, num_steps=16)
    result = jppo.train(lenient_env("CartPole-v1"), total_steps=64, config=config)
    run = jppo.RunConfig(eval_every=1, eval_episodes=1)
    ray = jppo.train("CartPole-v1", total_steps=64, config=config, backend="ray", num_actors=0, run=run)
    assert set(result.metrics) < set(ray.metrics)
    named = re.findall(r"^\| `([a-z_/]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(ray.metrics)


def test_details_page_names_existing_functions():
    text = (ROOT / "docs/details.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("|") and "`" in line.split("|")[2]]
    assert len(rows) > 20
    for row in rows:
        module, _, name = re.search(r"`([\w.]+)`", row)[1].rpartition(".")
        assert hasattr(importlib.import_module(f"jppo.{module}"), name)


def test_architecture_page_names_existing_files_and_objects():
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("## Where to make a change")[1].split("##")[0]
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[2:4]]
        for line in section.splitlines()
        if "`" in line
    ]
    assert len(rows) > 15
    for paths, names in rows:
        files = [ROOT / path for path in paths]
        assert all(file.exists() for file in files), paths
        source = "".join(file.read_text() for file in files if file.is_file())
        for name in names:
            assert re.search(rf"^(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE), name


@pytest.mark.slow
def test_loss_of_the_extension_page_trains():
    def with_symmetric_kl(apply, batch, hyperparams, config, key):
        total, metrics = ppo_loss(apply, batch, hyperparams, config, key)
        distribution, _ = apply(batch.obs)
        penalty = jax.numpy.mean(jax.numpy.square(distribution.log_prob(batch.action) - batch.log_prob))
        return total + 0.1 * penalty, metrics | {"loss/penalty": penalty}

    config = jppo.PPOConfig(num_envs=4, num_steps=16)
    result = jppo.train(lenient_env("CartPole-v1"), total_steps=256, config=config, loss=with_symmetric_kl)
    assert (result.metrics["loss/penalty"] > 0).all()


def test_loss_functions_and_options_have_docstrings():
    assert all(function.__doc__ for name, function in vars(losses).items() if inspect.isfunction(function))
    source = (ROOT / "jppo/config/ppo.py").read_text()
    for field in (*dataclasses.fields(jppo.PPOConfig), *dataclasses.fields(jppo.Hyperparams)):
        assert re.search(rf'    {field.name}: .*\n    """', source), field.name


@pytest.mark.slow
def test_readme_code_runs_with_actors(tmp_path):
    """Runs the code with fewer steps, in a new process with users' compiler options and without strict modes."""
    code = "\n".join(block.text for block in blocks(ROOT / "README.md", "python")).replace("500_000", "10_000")
    assert code.count("10_000") == 3
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=tmp_path, timeout=300)


def test_speeds_and_versions_agree_with_the_results(monkeypatch):
    """The picture of README and of the documentation, README's comparison and docs/performance.md show the same."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plot = importlib.import_module("readme_plot")
    with Image.open(plot.PICTURE) as picture:
        assert picture.text["Comment"] == plot.shown(), "run python benchmarks/readme_plot.py"
    result, page = plot.read_result(plot.DEVICE), (ROOT / "docs/performance.md").read_text()
    speeds = {row["workload"]: row["steps_per_second"] for row in result["rows"]}
    for name, of in speeds.items():
        cells = [f"{of[library] / 1000:.0f} k" for library in ("jppo", "jppo, 2 devices", "PureJaxRL", "rejax")]
        assert f"| {name} | {' | '.join(cells)} |" in page
    readme = (ROOT / "README.md").read_text()
    ratios = [[of["jppo"] / of[peer] for of in speeds.values()] for peer in ("PureJaxRL", "rejax")]
    ranges = [f"{min(values):.1f} to {max(values):.1f}" for values in ratios]
    assert f"| how many times as fast jppo is | | {' | '.join(ranges)} |" in readme
    assert f"jppo {result['versions']['jppo']}, {result['date']}" in page
    caption = "The picture names the version of jppo in each measurement."
    assert caption in readme
    assert caption in (ROOT / "docs/README.md").read_text()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_migration_pages_name_existing_settings():
    """The second column names arguments of public functions and fields of the records of `jppo.train`."""
    records = (jppo.PPOConfig, jppo.Hyperparams, jppo.RayConfig, jppo.RunConfig)
    names = {field.name for record in records for field in dataclasses.fields(record)}
    for function in (jppo.train, jppo.sweep, jppo.tune.trainable, jppo.load_policy):
        names |= set(inspect.signature(function).parameters)
    for page in (ROOT / "docs/migration").glob("*.md"):
        rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
        named = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row[1])}
        assert len(named) > 15 or page.name in ("README.md", "from_0.2.md"), page
        assert named <= names | {"action_mask", "env_steps", "stop", "update"}, page


ARGUMENTS = {
    "brax": "environment num_timesteps max_devices_per_host wrap_env vision augment_pixels num_envs episode_length "
    "action_repeat wrap_env_fn randomization_fn learning_rate entropy_cost discounting unroll_length batch_size "
    "num_minibatches num_updates_per_batch num_resets_per_eval normalize_observations normalize_observations_std_eps "
    "normalize_observations_mode normalize_until_count reward_scaling clipping_epsilon clipping_epsilon_value "
    "gae_lambda max_grad_norm normalize_advantage vf_loss_coefficient bootstrap_on_timeout use_distributional_critic "
    "desired_kl learning_rate_schedule learning_rate_schedule_min_lr learning_rate_schedule_max_lr network_factory "
    "seed use_pmap_on_reset num_evals eval_env num_eval_envs deterministic_eval log_training_metrics "
    "training_metrics_steps progress_fn policy_params_fn save_checkpoint_path restore_checkpoint_path restore_params "
    "restore_value_fn run_evals",
    "sb3": "policy env learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf "
    "normalize_advantage ent_coef vf_coef max_grad_norm use_sde sde_sample_freq rollout_buffer_class "
    "rollout_buffer_kwargs target_kl stats_window_size tensorboard_log policy_kwargs verbose seed device "
    "_init_setup_model",
    "cleanrl": "exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video save_model "
    "upload_model hf_entity env_id total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda "
    "num_minibatches update_epochs norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl batch_size "
    "minibatch_size num_iterations",
}


@pytest.mark.parametrize("library", ARGUMENTS)
def test_migration_pages_name_every_argument_of_the_other_library(library):
    """The arguments are those of the versions in docs/migration/README.md."""
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / f"docs/migration/{library}.md").read_text(), re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
    assert set(ARGUMENTS[library].split()) <= named


def test_navigation_starts_with_the_main_guides():
    nav = (ROOT / "mkdocs.yml").read_text().partition("- Guides:")[2]
    assert re.findall(r"- (\w.*): [\w/]+\.md$", nav, re.MULTILINE)[:8] == [
        "Devices",
        "Ray on one machine",
        "Clusters",
        "Sweeps and PBT",
        "Recurrence and masks",
        "Checkpoints",
        "Export",
        "Debugging a run that does not learn",
    ]


def test_command_line_page_has_a_section_for_each_command():
    headings = re.findall(r"^## jppo (.+)$", (ROOT / "docs/command_line.md").read_text(), re.MULTILINE)
    assert headings == list(COMMANDS)


def test_reference_contains_every_public_name_once():
    pages = (ROOT / "docs/reference").glob("*.md")
    named = [name for page in pages for name in re.findall(r"^::: jppo\.(\w+)$", page.read_text(), re.MULTILINE)]
    assert sorted(named) == sorted(jppo.__all__)


def test_reference_contains_every_type_in_annotations_of_public_names():
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    described = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    public = [getattr(jppo, name) for name in jppo.__all__]
    modules = [one.__name__ for one in public if inspect.ismodule(one)]  # the reference lists their members
    kinds = reachable_types()
    assert len(kinds) > 40
    for kind, owner in kinds.items():
        name = f"{kind.__module__}.{kind.__qualname__}"
        assert kind in public or name in described or kind.__module__ in modules, (
            f"{owner} has a {name}: add `::: {name}` to docs/reference/records.md, or the name to jppo.__all__"
        )


SETTINGS = ("PPOConfig", "Hyperparams", "RunConfig", "RayConfig", "PBTConfig")


def tables_of(monkeypatch, name):
    """Returns the tables of the settings of a dataclass: lists of rows (name, default, values, meaning)."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("settings").tables(name).split("### Advanced")
    lines = [[line for line in table.splitlines() if line.startswith("| `")] for table in tables]
    return [[[cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in rows] for rows in lines]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_tables_contain_each_field_once(name, monkeypatch):
    rows = [row for table in tables_of(monkeypatch, name) for row in table]
    assert sorted(row[0] for row in rows) == sorted(field.name for field in dataclasses.fields(getattr(jppo, name)))
    assert all(len(row) == 4 and all(row) for row in rows)
    pages = "".join((ROOT / "docs/reference" / page).read_text() for page in ("settings.md", "sweeps.md"))
    assert pages.count(f"<!-- settings: {name} -->") == 1


def test_settings_tables_state_defaults_and_ranges(monkeypatch):
    rows = {row[0]: tuple(row[1:3]) for name in SETTINGS for table in tables_of(monkeypatch, name) for row in table}
    assert rows["num_envs"] == ("64", "≥ 1")
    assert rows["network"] == ("mlp", "mlp`, `cnn")
    assert rows["normalize_obs"] == ("False", "True`, `False")
    assert rows["learning_rate"] == ("linear(0.00025, 0)", "≥ 0")
    assert rows["gamma"] == ("0.99", "0 to 1")
    assert rows["clip_eps"] == ("0.2", "> 0")
    assert rows["eval_episodes"] == ("16", "≥ 1")
    assert rows["envs_per_actor"] == ("num_envs/num_actors", "≥ 1")
    assert rows["actor_timeout"][1] == "> 0"
    assert rows["fraction"] == ("0.25", "> 0, ≤ 0.5")
    advanced = tables_of(monkeypatch, "PPOConfig")[1]
    assert [row[0] for row in advanced] == ["num_strata", "staggered_start", "compute_dtype"]


def test_navigation_contains_every_page_once_except_notes():
    notes = ROOT / "docs/notes"
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if page.parent != notes]
    named = re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted([*pages, "examples.md"]), (
        "add the page to `nav` in mkdocs.yml"
    )  # examples: generated


@pytest.mark.slow
def test_commands_of_all_pages_exist():
    argvs = [argv for page in PAGES for block in blocks(page, "sh") for argv in commands(block)]
    assert {argv[0] for argv in argvs} >= set(COMMANDS)
    for argv in argvs:
        if argv != ["--version"]:
            parse_command(argv)


def test_python_code_of_all_pages_uses_existing_names():
    for block in (block for page in PAGES for block in blocks(page, "python")):
        for node in ast.walk(ast.parse(block.text, str(block.page))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jppo":
                assert hasattr(jppo, node.attr), (block.page, node.attr)


def test_pages_contain_no_merge_conflicts():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE), page


def test_relative_links_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page}: {link}"
