"""`jppo eval`."""

import dataclasses

from jppo.cli.arguments import TrainedRun
from jppo.cli.output import print_json
from jppo.config.checks import escape_controls
from jppo.config.run import MAX_STEPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(TrainedRun):
    """Play episodes with a trained policy and print their returns."""

    num_episodes: int = 100
    """Number of episodes, played in parallel."""
    sampled: bool = False
    """Sample actions from the policy instead of taking the most likely action."""
    max_steps: int = MAX_STEPS
    """Maximum number of steps of an episode. A longer episode is cut and reported as unfinished."""
    seed: int = 0
    """Seed of the environments and of the sampled actions."""
    json: bool = False
    """Print one line of JSON instead of text."""

    def run(self) -> int:
        from jppo.config.checks import check_seed
        from jppo.runs.evaluation import evaluate

        check_seed(self.seed)
        run = self.load()
        result = evaluate(
            run.agent.env,
            run.policy,
            num_episodes=self.num_episodes,
            seed=self.seed,
            sampled=self.sampled,
            max_steps=self.max_steps,
        )
        summary = result.summary()
        if self.json:
            print_json({"env": run.agent.env.name, "sampled": self.sampled} | summary)
            return 0
        texts = [
            f"{run.agent.env.name}, {'sampled' if self.sampled else 'greedy'}, {summary['episodes']} episodes",
            f"return {summary['return_mean']:.2f} +- {summary['return_std']:.2f} "
            f"(min {summary['return_min']:.2f}, max {summary['return_max']:.2f}), "
            f"length {summary['length_mean']:.1f}",
        ]
        if summary["unfinished"]:
            texts.append(f"{summary['unfinished']} episodes did not end within --max-steps {self.max_steps}")
        print(*map(escape_controls, texts), sep="\n")
        return 0
