"""How often the verdict of a study is wrong, and how often it finds what is there.

    python benchmarks/verdicts.py --out verdicts.json

Studies are simulated: every method has one difference to its control a seed, and the rule of
`rarebit.study.statistics` judges them all together. Noise is normal, heavy-tailed (Student's t with 3 degrees
of freedom), or of unequal spread: of methods, or of seeds, between a quarter and four times the usual one. Each
method has a control of its own, or all share one, which makes their differences alike.

Wrong: methods without an effect, at a spread of ten times the minimum effect, so that only the interval
protects. All methods are such, or half of them; the others have a huge effect, which leaves Holm's
correction as mild as it can be. At most 5 % of studies may call any of them helpful.

Lopsided: the same with noise that the rule is not made for. Most seeds are a little above their mean and
a few far below, as one minus an exponential draw. Where the differences are so, no t interval over a few
seeds holds its level, and the table shows by how much it is missed; where a shared control has the same
noise as the methods, the two sides even out and it holds.

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

from rarebit.machine import machine
from rarebit.study.statistics import Comparison, judge

SEED = 7
LEVEL = 0.05
MINIMUM_EFFECT = 0.0005
METHODS, SEEDS = (1, 3, 8), (3, 5, 10)
NOISES = ("normal", "heavy-tailed", "unequal methods", "unequal seeds")
CONTROLS = ("own", "shared")
EFFECTS = (0.0, 0.0005, 0.001, 0.002)

Rule = Callable[[Mapping[str, Sequence[float]]], Mapping[str, Comparison]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a study is drawn from."""

    noise: str
    control: str
    methods: int
    seeds: int
    spread: float
    effect: float = 0.0
    """The true difference of the first methods to their control."""
    with_effect: int = 0
    """How many these are."""


def main() -> None:
    """Simulate all cases, print three tables, and write the report."""
    options = parse()
    facts = machine()  # before the studies: of this code
    start = time.perf_counter()
    wrong = [wrong_shares(case, options.studies) for case in cases_without_effect()]
    lopsided = [wrong_shares(case, options.studies) for case in cases_without_effect(["lopsided"])]
    found = [found_shares(case, options.studies) for case in cases_with_effect()]
    print(*map(table, (wrong, lopsided, found)), summary(wrong, options.studies), sep="\n\n")
    if options.out is not None:
        report = {
            "command": f"python benchmarks/verdicts.py --studies {options.studies}",
            "machine": facts,
            "studies": options.studies,
            "seed": SEED,
            "level": LEVEL,
            "minimum_effect": MINIMUM_EFFECT,
            "allowed": allowed(options.studies),
            "most_false_helps": max(result["false_helps"] for result in wrong),
            "most_false_either": max(result["false_either"] for result in wrong),
            "seconds": round(time.perf_counter() - start, 1),
            "wrong": wrong,
            "lopsided": lopsided,
            "found": found,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--studies", type=int, default=10_000, help="of each case")
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    return parser.parse_args(arguments)


def cases_without_effect(noises: Sequence[str] = NOISES) -> Iterator[Case]:
    """Yield families without any effect, then such where half of the methods have a huge one."""
    spread = 10 * MINIMUM_EFFECT
    grid = list(itertools.product(noises, CONTROLS, METHODS, SEEDS))
    for noise, control, methods, seeds in grid:
        yield Case(noise=noise, control=control, methods=methods, seeds=seeds, spread=spread)
    for noise, control, methods, seeds in grid:
        if control == "shared" and methods > 1:
            yield Case(
                noise=noise,
                control=control,
                methods=methods,
                seeds=seeds,
                spread=spread,
                effect=1000 * spread,
                with_effect=methods // 2,
            )


def cases_with_effect() -> Iterator[Case]:
    """Yield families whose first method has a true effect, or none to tell from one."""
    noises = ("normal", "heavy-tailed")
    for noise, methods, seeds, effect in itertools.product(noises, METHODS, SEEDS, EFFECTS):
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
    verdicts = judged(case, studies, rule)[:, case.with_effect :]  # (studies, methods without one)
    helps, hurts = verdicts == "helps", verdicts == "hurts"
    shares = {
        "false_helps": helps.any(1).mean(),
        "false_hurts": hurts.any(1).mean(),
        "false_either": (helps | hurts).any(1).mean(),
    }
    return dataclasses.asdict(case) | {name: float(share) for name, share in shares.items()}


def found_shares(case: Case, studies: int, rule: Rule | None = None) -> dict[str, Any]:
    """Return the case and how often the first method gets each verdict."""
    first = judged(case, studies, rule)[:, 0]  # (studies,)
    names = ("helps", "hurts", "no difference", "too few seeds")
    return dataclasses.asdict(case) | {name: float((first == name).mean()) for name in names}


def judged(case: Case, studies: int, rule: Rule | None) -> np.ndarray:
    """Return the verdict on every method of every study (studies, methods)."""
    rule = rule or (lambda study: judge(study, minimum_effect=MINIMUM_EFFECT, level=LEVEL))
    names = [f"method {i}" for i in range(case.methods)]
    verdicts = []
    for study in draw(case, studies).tolist():
        found = rule(dict(zip(names, study, strict=True)))
        verdicts.append([found[name].verdict for name in names])
    return np.array(verdicts)


def draw(case: Case, studies: int) -> np.ndarray:
    """Return the differences of some studies (studies, methods, seeds), the same at every call."""
    generator = np.random.default_rng([SEED, *json.dumps(dataclasses.asdict(case)).encode()])
    shape = (studies, case.methods, case.seeds)
    noise = sample(case.noise, generator, shape)
    if case.noise == "unequal methods":
        noise *= 4.0 ** generator.uniform(-1, 1, (studies, case.methods, 1))
    if case.control == "shared":
        noise = (noise - sample(case.noise, generator, (studies, 1, case.seeds))) / math.sqrt(2)
    if case.noise == "unequal seeds":
        noise *= 4.0 ** generator.uniform(-1, 1, (studies, 1, case.seeds))
    true = np.zeros((case.methods, 1))
    true[: case.with_effect] = case.effect
    return true + case.spread * noise


def sample(noise: str, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return noise with a standard deviation of one."""
    if noise == "heavy-tailed":
        return generator.standard_t(3, shape) / math.sqrt(3)
    if noise == "lopsided":
        return 1 - generator.standard_exponential(shape)
    return generator.standard_normal(shape)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table, shares in percent.

    >>> print(table([{"noise": "normal", "seeds": 3, "effect": 0.001, "helps": 0.25}]))
    | noise | seeds | effect | helps |
    |---|---|---|---|
    | normal | 3 | 0.001 | 25.0 % |
    """
    shares = {"false_helps", "false_hurts", "false_either"}
    shares |= {"helps", "hurts", "no difference", "too few seeds"}
    lines = [[name.replace("_", " ") for name in results[0]]]
    lines += [
        [f"{100 * x:.1f} %" if name in shares else f"{x}" for name, x in result.items()]
        for result in results
    ]
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def summary(wrong: Sequence[Mapping[str, Any]], studies: int) -> str:
    """Return one sentence: the worst case, and whether it is within what chance allows."""
    worst = max(wrong, key=lambda result: result["false_helps"])
    held = "within" if worst["false_helps"] <= allowed(studies) else "ABOVE"
    return (
        f'at worst {100 * worst["false_helps"]:.1f} % of studies have a false "helps" '
        f"({worst['noise']}, {worst['control']} control, {worst['methods']} methods, "
        f"{worst['seeds']} seeds): {held} the {100 * allowed(studies):.1f} % that 5 % and three "
        "standard errors of the simulation allow"
    )


def allowed(studies: int) -> float:
    """Return the level and three standard errors of a share that is at it."""
    return LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / studies)


if __name__ == "__main__":
    main()
