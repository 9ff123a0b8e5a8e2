"""What the study says, one row a claim: exact properties that must hold, and directions that were expected."""

from __future__ import annotations

import math
from collections.abc import Iterable

from experiments.evidence import Row, at_least, at_most, figure
from experiments.joined import Family, Joined, Run
from experiments.statistics import Estimate

EXACT = 1e-12  # float64 sums of some hundred terms
# Families of the chain: (name, figure, sign of centered - control that was expected, 0 for none).
EXPECTED = (
    ("noise0.5-placebo-none", "entropy", 1), ("noise1-placebo-none", "entropy", 1),
    ("noise1-placebo-tis", "entropy", 1), ("noise1-placebo-mis", "entropy", 1),
    ("noise0.5-raw-none", "entropy", 1), ("noise1-raw-none", "entropy", 1), ("noise1-raw-none", "reward", 1),
    ("noise1-raw-tis", "entropy", 1), ("noise1-raw-mis", "reward", 1), ("lag8-raw-none", "reward", 1),
    ("lag16-raw-none", "reward", 1), ("noise1-group-none", "entropy", 1),
    ("exact-raw-none", "reward", 0), ("exact-raw-none", "entropy", 0), ("exact-raw-tis", "entropy", 0),
    ("exact-group-none", "entropy", 0),
)  # fmt: skip
ADDITION = (
    ("int4-raw-none", "reward", 1), ("int4-raw-none", "gap", -1), ("dflash2-int4-raw-none", "reward", 1),
    ("lag8-raw-none", "reward", 1), ("exact-raw-none", "reward", 0), ("exact-raw-none", "entropy", 0),
)  # fmt: skip


def exact_rows(chain: Joined) -> list[Row]:
    """Properties that enumeration or bits decide."""
    runs = {(run.arm, run.seed): run for run in chain.runs if run.state == "finished"}

    def largest(pick: Iterable[Run]) -> float:
        return max((max(run.series["sc/drift_norm"].values()) for run in pick), default=math.nan)

    def least(pick: Iterable[Run]) -> float:
        return min((run.figures()["drift"] for run in pick), default=math.nan)

    centered = [run for (arm, _), run in runs.items() if arm.endswith("-on") and "head" not in arm]
    apart = [run for (arm, _), run in runs.items() if arm.endswith("none-diagnose") and arm.startswith("noise")]
    same = [
        (run, runs[arm.removesuffix("-off") + "-diagnose", seed]) for (arm, seed), run in runs.items()
        if arm.endswith("-off")
    ]  # fmt: skip
    tis, none = (left_by_head(runs, mode) for mode in ("tis", "none"))
    blind = bool(tis) and tis.keys() == none.keys() and all(tis[seed] > none[seed] for seed in tis)
    equal = sum(a.series["eval/trained_reward"] == b.series["eval/trained_reward"] for a, b in same)
    return [
        at_most("chain/drift_centered", largest(centered), EXACT, "", f"largest of {len(centered)} runs, all steps"),
        at_least("chain/drift_uncentered", least(apart), 1e-5, "", f"least run mean of {len(apart)}: noise, mode none"),
        Row("chain/off_is_diagnose", equal, "seeds", f"all of {len(same)}, bit for bit", 0 < equal == len(same),
            "the control measures and changes nothing"),
        Row("chain/tis_blind_spot", min(tis.values(), default=math.nan), "of the drift", "more than mode none leaves",
            blind, f"left by a head of 4 of 12 at the first update: tis {spread(tis)}, none {spread(none)}; TIS cuts "
            "tokens that the sampler finds unlikely, and those are not in its head"),
    ]  # fmt: skip


def left_by_head(runs: dict[tuple[str, int], Run], mode: str) -> dict[int, float]:
    """{seed: share of the drift that centering on a head of 4 leaves}, at the first update, of one same table."""
    arms = f"noise1-raw-{mode}-head4-on", f"noise1-raw-{mode}-head4-diagnose"
    seeds = [seed for arm, seed in runs if arm == arms[0] and (arms[1], seed) in runs]
    on, control = ([first(runs[arm, seed], "sc/drift_norm") for seed in seeds] for arm in arms)
    return {seed: a / b for seed, a, b in zip(seeds, on, control, strict=True)}


def spread(found: dict[int, float]) -> str:
    return f"{min(found.values()):.2f} to {max(found.values()):.2f}" if found else "not run"


def first(run: Run, metric: str) -> float:
    points = run.series[metric]
    return points[min(points)]


def expectation_rows(name: str, joined: Joined, expected: tuple[tuple[str, str, int], ...]) -> list[tuple[str, ...]]:
    """(claim, expected, found, verdict) of each direction; a contradicted one is called so."""
    families = {family.name: family for family in joined.families if not family.control.endswith("-off")}
    rows = []
    for family, what, sign in expected:
        words = {1: "higher with centering", -1: "lower with centering", 0: "no difference"}[sign]
        if family not in families or what not in families[family].figures:
            rows.append((f"{name} {family}: {what}", words, "not run", "not run"))
            continue
        control, found = families[family].figures[what][1], families[family].figures[what][2]
        rows.append((f"{name} {family}: {what}", words, f"{told(found)} from {figure(control.mean, 3)}",
                     judged(found, sign)))  # fmt: skip
    return rows


def judged(found: Estimate, sign: int) -> str:
    if sign == 0:
        kept = {"not shown": "as expected", "weak": "as expected, by Student's interval"}
        return kept.get(found.shown, "**contradicted**")
    if found.shown == "not shown":
        return "not shown"
    direction = "as expected" if found.mean * sign > 0 else "**contradicted**"
    return direction if found.shown == "shown" else f"{direction}, by the bootstrap alone"


def told(found: Estimate) -> str:
    if found.count == 1:
        return f"{found.mean:+.3g} (one seed)"
    bootstrap = f"bootstrap [{found.low:.3g}, {found.high:.3g}]"
    return f"{found.mean:+.3g}, {bootstrap}, Student [{found.t_low:.3g}, {found.t_high:.3g}]"


def family_rows(name: str, joined: Joined) -> list[Row]:
    """Every difference of every family, as rows that only report."""
    rows = []
    for family in joined.families:
        mark = "/off" if family.control.endswith("-off") else ""
        for what, (treated, control, difference) in family.figures.items():
            words = f"{figure(control.mean)} to {figure(treated.mean)}; {told(difference)}; {difference.shown}"
            detail = f"{words}; seeds {list(family.seeds)}"
            rows.append(Row(f"{name}/{family.name}{mark}/{what}", difference.mean, detail=detail))
    return rows


def headline(family: Family, name: str) -> str:
    """`0.31 to 0.95 (+0.64)` of one figure, bold where shown."""
    if name not in family.figures:
        return "-"
    treated, control, difference = family.figures[name]
    text = f"{figure(control.mean, 3)} to {figure(treated.mean, 3)}"
    return f"**{text}**" if difference.shown == "shown" else f"{text} ?" if difference.shown == "weak" else text
