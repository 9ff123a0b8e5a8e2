"""Part `rows`: what each arm says it is, and every row that it returns."""

from __future__ import annotations

from collections import Counter

import numpy as np

from experiments.evidence import Row, all_of, report
from experiments.tasks import addition
from miles_ext.capability import ArmKind, require
from miles_ext.errors import CapabilityError, SupportError
from miles_ext.records import Commit, SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import from_json
from tests.sglang_cpu.answers import Answer, ask, check, check_commits
from tests.sglang_cpu.server import Server
from tests.sglang_cuda import target

LENGTH = 40
SPECS = {
    f"{name} T{temperature:g}": SamplingSpec(temperature=temperature, **fields)
    for name, fields in {
        "K32": {"capture": "head", "head_size": 32},
        "K128": {"capture": "head", "head_size": 128},
        "k32 p0.95": {"top_k": 32, "top_p": 0.95},
        "k4 p0.9": {"top_k": 4, "top_p": 0.9},
    }.items()
    for temperature in (1.0, 0.7)
}


def prompts(count: int) -> list[list[int]]:
    """Half are problems that the target knows, half are noise, which keeps it uncertain. Eight tokens each."""
    noise = np.random.default_rng(0).integers(0, 512, (count // 2, 8)).tolist()
    return [addition.encode(addition.problem(5, 0, i).prompt) for i in range(count - count // 2)] + noise


def rows(server: Server, arm: ArmKind, device: str, count: int) -> list[Row]:
    found = capability(server, arm, device)
    for name, spec in SPECS.items():
        answers = ask(server, prompts(count), spec, max_new_tokens=LENGTH, ignore_eos=True)
        found += [contract(arm, name, answers), reference(arm, name, spec, answers, device)]
    return found


def capability(server: Server, arm: ArmKind, device: str) -> list[Row]:
    (rank,) = server.ranks()
    found = from_json(rank)
    try:
        for spec in SPECS.values():
            require(found, spec, arm, allow_test_verifier=device == "cpu")
        refused = ""
    except CapabilityError as error:
        refused = str(error)
    said = f"{found.engine_version}, verifier {found.verifier} ({found.verifier_impl}), sampling verify available "
    said += f"{found.dflash_sampling_verify_available}, order {found.filter_orders[0]}, patches "
    said += ", ".join(sorted(found.patches)) + f"; complaints: {found.extra['complaints'] or 'none'}; {refused}"
    return [Row(f"capability/{arm}", float(not refused), "", "accepted by require", not refused, said)]


def contract(arm: ArmKind, name: str, answers: list[Answer]) -> Row:
    """Every row valid and every token with a commit kind that the arm can have."""
    held, broken = 0, ""
    for answer in answers:
        try:
            check(answer)
            check_commits(answer, arm)
            held += len(answer.rows)
        except (AssertionError, SupportError, ValueError) as error:
            broken = f"; {type(error).__name__}: {error}"
    total = sum(answer.meta["completion_tokens"] for answer in answers)
    kinds = Counter(Commit(kind).name for answer in answers for kind in answer.commit.tolist())
    sizes = SupportRows.concatenate([answer.rows for answer in answers]).lengths
    steps = sum(answer.meta.get("spec_verify_ct", 0) for answer in answers)
    detail = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) + f"; sizes {sizes.min()}..{sizes.max()}"
    detail += f", mean {sizes.mean():.3f}" + (f"; accept length {total / steps:.3f}" if steps else "") + broken
    return all_of(f"rows/{arm} {name}", held, total, detail)


def reference(arm: ArmKind, name: str, spec: SamplingSpec, answers: list[Answer], device: str) -> Row:
    logits = target.logits([answer.prompt for answer in answers], [answer.ids for answer in answers], device)
    laws = target.law(logits, spec).flatten(0, 1)
    apart, equal = target.distances(SupportRows.concatenate([answer.rows for answer in answers]), laws)
    detail = f"mean {apart.mean():.5f}, 99 % {np.quantile(apart, 0.99):.5f}, same ids in {equal.mean():.2%} of rows"
    return report(f"float64/{arm} {name}", apart.max(), "largest total variation", detail)
