"""`jppo.sweep`: trains every combination of settings with every seed on the device."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from jppo.config.checks import check_function, check_int, check_path
from jppo.config.keywords import SweepKeywords
from jppo.config.overrides import explain_keywords, take_events, take_network
from jppo.config.pbt import PBTConfig, read_selection
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.run import RunConfig
from jppo.devices.memory import explain_out_of_memory
from jppo.ppo.learner import LearnerFactory
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network
from jppo.runs.display import show_count
from jppo.sweeps.grid import ProgramGroup, check_num_devices, check_seeds, check_settings, make_groups
from jppo.sweeps.halving import GroupTrainer
from jppo.sweeps.log import SweepProgress
from jppo.sweeps.pbt import check_pbt
from jppo.sweeps.pbt_trainer import PBTTrainer
from jppo.sweeps.results import SweepResult
from jppo.sweeps.store import SweepStore
from jppo.training.interrupts import stop_on_interrupt
from jppo.training.progress import Reporter, check_progress, make_reporter, short_path
from jppo.training.settings import RunSettings


@explain_keywords
def sweep(
    env: Any,
    *,
    seeds: int | Sequence[int] = 4,
    total_steps: int | float | None = None,
    config: PPOConfig | Mapping[str, Any] | None = None,
    hyperparams: Hyperparams | Mapping[str, Any] | None = None,
    preset: str = "auto",
    network: Network | str | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    learner: LearnerFactory | None = None,
    selection: PBTConfig | str | None = None,
    max_parallel_runs: int | None = None,
    num_devices: int | None = None,
    sweep_dir: str | Path | None = None,
    run: RunConfig | Mapping[str, Any] = RunConfig(),
    **settings: Unpack[SweepKeywords],
) -> SweepResult:
    """Trains every combination of settings with every seed on the device.

    All runs with the same environment and the same PPOConfig train together in one compiled program. Each run draws the
    same random numbers as `jppo.train` with its settings; rounding differs, so returns separate after many updates. A
    run that diverges does not affect the others.

    Args:
      env: a JAX environment as for `jppo.train`, or a list of them.
      seeds: number of seeds (0, 1, ...), or a list of seeds.
      total_steps, config, hyperparams, preset, network, optimizer, loss, advantages, learner: as for `jppo.train`, for
        every run.
      selection: what happens to the worst runs of each program; default: nothing.
        "successive_halving": the worse half stops after 1/16, 1/8, 1/4 and 1/2 of the updates (fewer times if there
        are fewer than 16 runs); the other runs continue in a smaller program. Jamieson and Talwalkar (2016),
        "Non-stochastic best arm identification and hyperparameter optimization".
        A `jppo.PBTConfig`, or "pbt" for its default values: population-based training. At regular times, the worst runs
        become copies of the best ones, and the hyperparameters with several values change in the copies.
      max_parallel_runs: maximum number of runs in one program. Default: as many as the devices' memory holds.
      num_devices: number of devices that share the runs. Default: all devices of this process.
      sweep_dir: directory for the result of each run, a table (runs.csv) and learning curves (curves.png). Runs
        that it already contains are not trained again.
      run: evaluations, the return at which each run stops, and the progress display: eval_every, eval_episodes,
        eval_sampled, eval_max_steps, stop_at_return and progress of `jppo.RunConfig`. `progress` may also be a function
        that gets the number of environment steps of all runs and returns a reporter.
      **settings: fields of `jppo.Hyperparams` and `jppo.PPOConfig`, each one value or a list of values. Each
        combination of PPOConfig fields is a separate program. Or the fields of `run`, each one value.

    Ctrl-C stops the sweep early and returns the results so far; a second Ctrl-C raises KeyboardInterrupt. The next call
    with the same arguments and the same sweep_dir keeps finished runs and starts unfinished ones again from the
    beginning; population-based training continues from checkpoints.

    Raises:
      ValueError: an argument is invalid; nothing has been trained.
      TypeError: an unknown argument.
    """
    if sweep_dir is not None:  # an environment may change the working directory
        sweep_dir = check_path("sweep_dir", sweep_dir).absolute()
    run, others = take_events(run, settings, "jppo.sweep")
    _check_progress(run.progress)
    network, others = take_network(network, others)
    values = check_settings(others)
    groups = make_groups(
        RunSettings(
            env=env,
            total_steps=total_steps,
            config=config,
            hyperparams=hyperparams,
            preset=preset,
            network=network,
            optimizer=optimizer,
            loss=loss,
            advantages=advantages,
            learner=learner,
            run=run,
        ),
        seeds=check_seeds(seeds),
        values=values,
        selection=read_selection(selection),
        max_parallel_runs=None if max_parallel_runs is None else check_int("max_parallel_runs", max_parallel_runs, 1),
        num_devices=check_num_devices(num_devices),
    )
    if isinstance(groups[0].selection, PBTConfig):
        check_pbt(groups[0].selection, groups, values)
    store = SweepStore(sweep_dir, groups, values)
    _train_missing_runs(groups, store, run.progress)
    return store.result()


def _check_progress(progress: Any) -> None:
    """Raises ValueError if `progress` is neither valid for `jppo.train` nor a function of the number of steps."""
    if isinstance(progress, type) or not callable(progress):
        check_progress(progress)
    else:
        check_function("progress", progress, "total_steps")


def _train_missing_runs(
    groups: list[ProgramGroup], store: SweepStore, progress: str | Callable[[int], Reporter]
) -> None:
    """Trains the runs that the store does not contain, and adds their results to it."""
    remaining = [group._replace(runs=runs) for group in groups if (runs := store.missing_runs(group))]
    planned_steps = max(1, sum(group.planned_steps for group in remaining))
    reporter = make_reporter(progress(planned_steps) if callable(progress) else progress, planned_steps)
    sweep_progress = SweepProgress(reporter)
    limit, is_population = groups[0].max_parallel_runs, isinstance(groups[0].selection, PBTConfig)
    remedy = "use fewer runs" if is_population else "set max_parallel_runs" + (f" below {limit}" if limit else "")
    try:
        reporter.start()
        with stop_on_interrupt(reporter) as stop_requested, explain_out_of_memory(remedy):
            _announce(remaining, len(store), reporter)
            for group in remaining:
                arguments = group, sweep_progress, stop_requested, functools.partial(store.add, group)
                if is_population:
                    PBTTrainer(*arguments).train(store.checkpoint_dir(group))
                else:
                    GroupTrainer(*arguments).train()
            if stop_requested() and store.path is not None:
                rest = "resumes the populations" if is_population else "trains the others from the beginning"
                path = short_path(store.path)
                reporter.message(f"the same sweep with sweep_dir {path} keeps the finished runs and {rest}")
    finally:
        reporter.close()


def _announce(groups: list[ProgramGroup], num_saved: int, reporter: Reporter) -> None:
    """Shows the number of runs and programs before training starts."""
    runs, programs = show_count(sum(len(group.runs) for group in groups), "run"), show_count(len(groups), "program")
    saved = f"; {show_count(num_saved, 'run')} already saved" if num_saved else ""
    reporter.message(f"{runs} in {programs}{saved}")
    for group in groups if len(groups) > 1 else []:
        reporter.message(f"  {group.name}: {show_count(len(group.runs), 'run')}")
