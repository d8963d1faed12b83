"""How often the verdict of a study is wrong, and how often it finds what is there.

    python benchmarks/verdicts.py --out benchmarks/results/verdicts.json

Studies are simulated: every method has one difference to its control per seed, and the rule of
`rarebit.study.statistics` judges them all together, here for thousands of studies at once (a test compares both).

Noise of a seed is normal, heavy-tailed (Student's t with 3 degrees of freedom), or lopsided: exponential,
lognormal, or from a mixture in which one seed in ten is ten spreads better. Mirrored, most seeds are a little
above their mean and a few far below. All methods have the same spread, or spreads between a quarter and four times
the usual one; or the seeds have. Each method has a control of its own, or all share one, which makes their
differences alike.

Wrong: methods without an effect, at a spread of ten times the minimum effect, so that only the interval
protects. All methods are such, or half of them; the others have a huge effect, which leaves Holm's correction as
mild as it can be. Where the noise is normal, heavy-tailed or exponential, at most 5 % of studies may call any of
them helpful. `t alone` is Student's t with Holm's correction, without the pooled spread.

Found: one method has an effect, the others have none, all share a control, and the spread is the minimum effect.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from rarebit.machine import machine
from rarebit.study.statistics import EQUIVALENCE_LEVEL, POOLING_METHODS

SEED = 7
LEVEL = 0.05
MINIMUM_EFFECT = 0.0005
METHODS, SEEDS = (1, 5, 20), (3, 5, 10, 20)
SYMMETRIC = ("normal", "heavy-tailed")
HELD = (*SYMMETRIC, "exponential", "mirrored-exponential")
"""The noises for which the level is promised."""
NOISES = (*HELD, "lognormal", "mirrored-lognormal", "mixture", "mirrored-mixture")
SPREADS = ("equal", "unequal methods", "unequal seeds")
CONTROLS = ("own", "shared")
EFFECTS = (0.0, 0.0005, 0.001, 0.002)

Rule = Callable[[np.ndarray], np.ndarray]
"""From the differences of studies (studies, methods, seeds) to their verdicts (studies, methods)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a study is drawn from."""

    noise: str
    spreads: str = "equal"
    control: str = "own"
    methods: int
    seeds: int
    spread: float = 10 * MINIMUM_EFFECT
    effect: float = 0.0
    """The true difference of the first methods to their control."""
    with_effect: int = 0
    """How many these are."""

    @property
    def is_held(self) -> bool:
        """Whether the level is promised."""
        return self.noise in SYMMETRIC or (self.noise in HELD and self.spreads == "equal")


def main() -> None:
    """Simulate all cases, print two tables, and write the report."""
    options = parse()
    facts = machine()  # before the studies: of this code
    start = time.perf_counter()
    wrong = [wrong_shares(case, options.studies) for case in cases_without_effect()]
    found = [found_shares(case, options.studies) for case in cases_with_effect()]
    held = [case for case in wrong if Case(**_without_shares(case)).is_held]
    print(*map(table, (wrong, found)), summary(held, options.studies), sep="\n\n")
    if options.out is not None:
        report = {
            "command": f"python benchmarks/verdicts.py --studies {options.studies}",
            "machine": facts,
            "studies": options.studies,
            "seed": SEED,
            "level": LEVEL,
            "minimum_effect": MINIMUM_EFFECT,
            "allowed": allowed(options.studies),
            "most_false_helps": max(result["false_helps"] for result in held),
            "most_false_either": max(result["false_either"] for result in held),
            "seconds": round(time.perf_counter() - start, 1),
            "worst": worst(wrong),
            "wrong": wrong,
            "found": found,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--studies", type=int, default=20_000, help="of each case")
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    return parser.parse_args(arguments)


def cases_without_effect() -> Iterator[Case]:
    """Yield families without any effect, then such where half of the methods have a huge one."""
    for noise, spreads, control in itertools.product(NOISES, SPREADS, CONTROLS):
        # unequal seeds are symmetric noise of another shape; a shared control evens out the two sides
        if noise in SYMMETRIC or (spreads != "unequal seeds" and control == "own"):
            for methods, seeds in itertools.product(METHODS, SEEDS):
                case = Case(
                    noise=noise, spreads=spreads, control=control, methods=methods, seeds=seeds
                )
                yield case
                if methods > 1 and spreads == "equal":
                    huge = {"effect": 1000 * case.spread, "with_effect": methods // 2}
                    yield dataclasses.replace(case, **huge)


def cases_with_effect() -> Iterator[Case]:
    """Yield families whose first method has a true effect, or none to tell from one."""
    for noise, methods, seeds, effect in itertools.product(SYMMETRIC, METHODS, SEEDS, EFFECTS):
        yield Case(
            noise=noise,
            control="shared",
            methods=methods,
            seeds=seeds,
            spread=MINIMUM_EFFECT,
            effect=effect,
            with_effect=1,
        )


def wrong_shares(case: Case, studies: int, rule: Rule | None = None) -> dict[str, Any]:
    """Return the case and the share of its studies that see an effect where there is none."""
    drawn = draw(case, studies)
    verdicts, former = (one(drawn)[:, case.with_effect :] for one in (rule or verdicts_of, t_alone))
    helps, hurts = verdicts == "helps", verdicts == "hurts"
    shares = {
        "false_helps": helps.any(1).mean(),
        "false_hurts": hurts.any(1).mean(),
        "false_either": (helps | hurts).any(1).mean(),
        "false_helps_of_t_alone": (former == "helps").any(1).mean(),
    }
    return dataclasses.asdict(case) | {name: float(share) for name, share in shares.items()}


def found_shares(case: Case, studies: int, rule: Rule | None = None) -> dict[str, Any]:
    """Return the case and how often the first method gets each verdict."""
    drawn = draw(case, studies)
    first = (rule or verdicts_of)(drawn)[:, 0]  # (studies,)
    names = ("helps", "hurts", "no difference", "too few seeds")
    shares = {name: float((first == name).mean()) for name in names}
    shares["helps_by_t_alone"] = float((t_alone(drawn)[:, 0] == "helps").mean())
    return dataclasses.asdict(case) | shares


def verdicts_of(differences: np.ndarray, *, pools: bool = True) -> np.ndarray:
    """Return the verdict of the rule on every method of every study.

    differences   (studies, methods, seeds)
    pools         False for Student's t with Holm's correction alone
    """
    _, methods, n = differences.shape
    mean = differences.mean(2)  # (studies, methods)
    spread = differences.std(2, ddof=1)
    error = abs(mean) * math.sqrt(n)
    p = 2 * stdtr(n - 1, -error / spread)
    most = LEVEL
    if pools:
        pooled = np.sqrt((spread**2).mean(1, keepdims=True))
        p = np.maximum(p, 2 * stdtr(methods * (n - 1), -error / pooled))
        most *= min(methods / POOLING_METHODS, 1.0)
    levels = np.minimum(LEVEL / (methods - np.arange(methods)), most)
    in_order = np.logical_and.accumulate(np.sort(p, axis=1) < levels, axis=1)
    rank = p.argsort(axis=1).argsort(axis=1)
    is_significant = np.take_along_axis(in_order, rank, axis=1)
    inner = -stdtrit(n - 1, EQUIVALENCE_LEVEL / 2) * spread / math.sqrt(n)
    is_small = abs(mean) + inner < MINIMUM_EFFECT
    verdicts = np.where(is_small, "no difference", "too few seeds")
    verdicts[is_significant & (mean >= MINIMUM_EFFECT)] = "helps"
    verdicts[is_significant & (mean <= -MINIMUM_EFFECT)] = "hurts"
    return verdicts


def t_alone(differences: np.ndarray) -> np.ndarray:
    """Return the verdicts of Student's t with Holm's correction."""
    return verdicts_of(differences, pools=False)


def draw(case: Case, studies: int) -> np.ndarray:
    """Return the differences of some studies (studies, methods, seeds), the same at every call."""
    generator = np.random.default_rng([SEED, *json.dumps(dataclasses.asdict(case)).encode()])
    shape = (studies, case.methods, case.seeds)
    noise = sample(case.noise, generator, shape)
    if case.spreads == "unequal methods":
        noise *= 4.0 ** generator.uniform(-1, 1, (studies, case.methods, 1))
    if case.control == "shared":
        noise = (noise - sample(case.noise, generator, (studies, 1, case.seeds))) / math.sqrt(2)
    if case.spreads == "unequal seeds":
        noise *= 4.0 ** generator.uniform(-1, 1, (studies, 1, case.seeds))
    true = np.zeros((case.methods, 1))
    true[: case.with_effect] = case.effect
    return true + case.spread * noise


def sample(noise: str, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return noise with a mean of zero and a standard deviation of one."""
    if noise.startswith("mirrored-"):
        return -sample(noise.removeprefix("mirrored-"), generator, shape)
    if noise == "heavy-tailed":
        return generator.standard_t(3, shape) / math.sqrt(3)
    if noise == "exponential":
        return generator.standard_exponential(shape) - 1
    if noise == "lognormal":
        drawn = np.exp(generator.standard_normal(shape))
        return (drawn - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
    drawn = generator.standard_normal(shape)
    if (
        noise == "mixture"
    ):  # one seed in ten is ten spreads away: mean 1, variance 1 + 0.1 * 0.9 * 10^2
        drawn = (drawn + 10 * (generator.random(shape) < 0.1) - 1) / math.sqrt(10)
    return drawn


def worst(wrong: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the highest share of false "helps" over the numbers of seeds: by noise, spreads and methods."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for result in wrong:
        of = found.setdefault(result["noise"], {}).setdefault(result["spreads"], {})
        for rule, share in (("", "false_helps"), (" by t alone", "false_helps_of_t_alone")):
            key = f"{result['methods']}{rule}"
            of[key] = max(of.get(key, 0.0), result[share])
    return found


def _without_shares(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in Case.__dataclass_fields__}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table, shares in percent.

    >>> print(table([{"noise": "normal", "seeds": 3, "effect": 0.001, "helps": 0.25}]))
    | noise | seeds | effect | helps |
    |---|---|---|---|
    | normal | 3 | 0.001 | 25.0 % |
    """
    shares = {"false_helps", "false_hurts", "false_either", "false_helps_of_t_alone"}
    shares |= {"helps", "hurts", "no difference", "too few seeds", "helps_by_t_alone"}
    lines = [[name.replace("_", " ") for name in results[0]]]
    lines += [
        [f"{100 * x:.1f} %" if name in shares else f"{x}" for name, x in result.items()]
        for result in results
    ]
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def summary(held: Sequence[Mapping[str, Any]], studies: int) -> str:
    """Return one sentence: the worst case of those promised, and whether it is within what chance allows."""
    worst_case = max(held, key=lambda result: result["false_helps"])
    is_within = "within" if worst_case["false_helps"] <= allowed(studies) else "ABOVE"
    return (
        f'at worst {100 * worst_case["false_helps"]:.1f} % of studies have a false "helps" '
        f"({worst_case['noise']}, {worst_case['control']} control, {worst_case['methods']} methods, "
        f"{worst_case['seeds']} seeds): {is_within} the {100 * allowed(studies):.1f} % that 5 % and three "
        "standard errors of the simulation allow"
    )


def allowed(studies: int) -> float:
    """Return the level and three standard errors of a share that is at it."""
    return LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / studies)


if __name__ == "__main__":
    main()
